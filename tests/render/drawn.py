"""A pipeline whose processor draws: a feature is a function of its media, so that thousands of items cost nothing."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping
from typing import Any

from semel.cache import Cache
from semel.core import Feature, Key, Layout, Mask, Media, Tensor
from semel.render import ChatRenderer, ChatRequest, Pipeline

FEATURE_BYTES = 4_096


def drawn(media: Media) -> Feature:
    """Tensors and a layout that tell one item from another; every other one has a mask."""
    number = int(media.data)
    pixels = Tensor("uint8", (FEATURE_BYTES,), memoryview(bytes([number % 256]) * FEATURE_BYTES))
    token_ids = (1, *[2] * (1 + number % 5), 3)
    mask = Mask([False, *[True] * (1 + number % 5), False]) if number % 2 else None
    return Feature(media.modality, {"pixel_values": pixels}, Layout(token_ids, mask))


class Drawing:
    """Counts what a pipeline looks up and processes."""

    def __init__(self, renderer: ChatRenderer, cache: Cache) -> None:
        self.lookups: Counter[tuple[str, bool]] = Counter()
        self.processed: list[int] = []
        self.cache = cache
        self.pipeline = Pipeline(
            renderer.tokenizer, renderer, self.process, "drawn", Key(bytes(32)), cache, lookups=self.count
        )

    async def process(self, media: Media, options: Mapping[str, object], **_: object) -> Feature:  # noqa: ARG002
        self.processed.append(int(media.data))
        return drawn(media)

    def count(self, modality: str, count: int, hit: bool) -> None:
        self.lookups[modality, hit] += count

    def seen(self) -> tuple[object, ...]:
        """All that a caller who executes can see, but for what is held."""
        flight = self.pipeline.flight
        return len(self.cache), self.cache.nbytes, self.cache.evictions, self.lookups, flight.joined, len(flight)


def image_part(number: int) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(str(number).encode()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def chat(*numbers: int) -> ChatRequest:
    return ChatRequest([{"role": "user", "content": [*map(image_part, numbers), {"type": "text", "text": "?"}]}])
