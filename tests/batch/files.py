"""Batch files of tests, and batches that run in this process."""

from __future__ import annotations

import asyncio
import base64
import json
from collections import Counter
from pathlib import Path
from typing import Any

from semel.batch.run import BatchProgress, run_batch
from semel.batch.settings import BatchSettings

__all__ = ["CHAT", "Batch", "chat", "data_url", "request"]

CHAT = "/v1/chat/completions"


def data_url(number: int, size: int = 3_000) -> str:
    """A data URL, another one for each number; no image."""
    return f"data:image/png;base64,{base64.b64encode(number.to_bytes(4, 'big') * (size // 4)).decode()}"


def chat(*urls: str, text: str = "What is this?", **fields: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}], **fields}


def request(custom_id: str, body: Any, **fields: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body, **fields}


class Batch:
    """A batch file, and the file of its results."""

    def __init__(self, home: Path, *requests: dict[str, Any] | str) -> None:
        self.input, self.output = home / "in.jsonl", home / "out.jsonl"
        self.shown: list[BatchProgress] = []
        self.write(*requests)

    def write(self, *requests: dict[str, Any] | str) -> None:
        lines = [one if isinstance(one, str) else json.dumps(one) for one in requests]
        self.input.write_text("".join(f"{line}\n" for line in lines))

    def run(self, url: str, key: str | None = None, **settings: Any) -> BatchProgress:
        made = BatchSettings(self.input, self.output, **settings)
        return asyncio.run(asyncio.wait_for(run_batch(made, url, key, self.shown.append), 60))

    @property
    def results(self) -> dict[str, Any]:
        """The results by their custom ids, each of which is there once."""
        found = [json.loads(line) for line in self.output.read_text().splitlines()]
        assert {*Counter(one["custom_id"] for one in found).values()} <= {1}
        return {one["custom_id"]: one for one in found}
