"""Transcribe many clips at once, with a progress bar, and print a line of JSON for each.

    semel serve WHISPER
    python examples/transcribe.py --language en clips/*.wav > transcripts.jsonl

A clip that cannot be transcribed has an `error` instead of a `text`; the others go on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

import openai
from rich.console import Console
from rich.progress import track


async def transcribe(client: openai.AsyncOpenAI, model: str, path: Path, language: str) -> dict[str, str]:
    """One clip as text, or what went wrong with it."""
    try:
        answer = await client.audio.transcriptions.create(model=model, file=path, language=language)
    except openai.APIError as error:
        return {"file": path.name, "error": error.message}
    return {"file": path.name, "text": answer.text}


async def main() -> None:
    """Transcribe all clips, a few at a time."""
    parser = argparse.ArgumentParser(description="Transcribe clips.")
    parser.add_argument("clips", nargs="+", type=Path)
    parser.add_argument("--language", default="en")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key", default="none")
    given = parser.parse_args()

    client = openai.AsyncOpenAI(base_url=f"{given.url}/v1", api_key=given.api_key)
    model = (await client.models.list()).data[0].id
    turns = asyncio.Semaphore(given.at_once)

    async def in_turn(path: Path) -> dict[str, str]:
        async with turns:
            return await transcribe(client, model, path, given.language)

    work = [asyncio.create_task(in_turn(path)) for path in given.clips]
    bar = Console(stderr=True)
    for done in track(asyncio.as_completed(work), "Transcribing", total=len(work), console=bar):
        print(json.dumps(await done), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
