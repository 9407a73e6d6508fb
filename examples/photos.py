"""Ask questions about a folder of photos, one after another, and see what each question costs.

    semel serve MODEL
    python examples/photos.py FOLDER "What is in these photos?" "Which of them was taken indoors?"

The photos travel with every question, as OpenAI's API wants it. Only the first one makes the fleet work on them: the
counters behind each answer say how many photos were preprocessed for it, and how many bytes were not sent again.
"""

from __future__ import annotations

import argparse
import base64
import mimetypes
import urllib.request
from pathlib import Path
from typing import Any

import openai

from semel.telemetry import metrics
from semel.telemetry.scrape import Scrape


def photo(path: Path) -> dict[str, Any]:
    """A photo as part of a message."""
    kind = mimetypes.guess_type(path)[0] or "image/jpeg"
    return {
        "type": "image_url",
        "image_url": {"url": f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"},
    }


def scrape(url: str) -> Scrape:
    """What the frontend has counted until now."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        return Scrape.parse(answer.read().decode())


def main() -> None:
    """Ask every question in one conversation."""
    parser = argparse.ArgumentParser(description="Chat about a folder of photos.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("questions", nargs="+")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--metrics-url", help="where --metrics-port serves them; at --url unless given")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--max-tokens", type=int, default=128)
    given = parser.parse_args()

    photos = [
        photo(path) for path in sorted(given.folder.iterdir()) if path.suffix in (".jpg", ".jpeg", ".png", ".webp")
    ]
    client = openai.OpenAI(base_url=f"{given.url}/v1", api_key=given.api_key)
    model = client.models.list().data[0].id
    counters = given.metrics_url or given.url
    messages: list[Any] = [{"role": "user", "content": photos}]
    for question in given.questions:
        messages.append({"role": "user", "content": question})
        before = scrape(counters)
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=given.max_tokens)
        after = scrape(counters)
        reply = answer.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": reply})
        processed = after.total(metrics.POOL_PROCESSED) - before.total(metrics.POOL_PROCESSED)
        saved = after.total(metrics.FEATURE_BYTES_SAVED) - before.total(metrics.FEATURE_BYTES_SAVED)
        print(f"> {question}\n{reply}")
        print(f"  [{processed:.0f} of {len(photos)} photos preprocessed, {saved / 1e6:.1f} MB not sent again]\n")


if __name__ == "__main__":
    main()
