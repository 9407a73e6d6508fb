"""Read a folder of document pages, some at a time, into one line of JSON each; a second run goes on where it stopped.

    semel serve MODEL
    python examples/pages.py FOLDER pages.jsonl --at-a-time 16

A page that the server has no room for at the moment (429, 503) is asked again by the `openai` package. One that it
refuses is written with the reason, and costs no other page anything.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import mimetypes
from pathlib import Path
from typing import Any

import openai


def page_parts(path: Path, question: str) -> list[Any]:
    """A page and what is wanted of it."""
    kind = mimetypes.guess_type(path)[0] or "image/png"
    url = f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]


async def read(options: argparse.Namespace) -> None:
    """Read all pages that are not read yet."""
    client = openai.AsyncOpenAI(base_url=f"{options.url}/v1", api_key=options.api_key, max_retries=10)
    model = (await client.models.list()).data[0].id
    finished = set()
    if options.output.exists():
        finished = {json.loads(line)["page"] for line in options.output.read_text().splitlines()}
    pages = sorted(path for path in options.folder.iterdir() if path.suffix in (".jpg", ".jpeg", ".png", ".webp"))
    left = iter([path for path in pages if path.name not in finished])

    with options.output.open("a") as output:

        async def work() -> None:
            for path in left:
                content = page_parts(path, options.question)
                try:
                    answer = await client.chat.completions.create(
                        model=model,
                        messages=[{"role": "user", "content": content}],
                        max_tokens=options.max_tokens,
                        temperature=0.0,
                    )
                    line = {"page": path.name, "text": answer.choices[0].message.content}
                except openai.BadRequestError as error:
                    line = {"page": path.name, "error": error.message}
                output.write(json.dumps(line) + "\n")
                output.flush()

        await asyncio.gather(*(work() for _ in range(options.at_a_time)))
    print(f"{len(pages)} pages, {len(pages) - len(finished)} of them read now")


def main() -> None:
    """Read a folder."""
    parser = argparse.ArgumentParser(description="Read document pages.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--question", default="Transcribe this page.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--at-a-time", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=1_024)
    asyncio.run(read(parser.parse_args()))


if __name__ == "__main__":
    main()
