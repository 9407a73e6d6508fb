"""Decides whether a request is small enough to be parsed on the event loop: a hop to a thread and back costs 0.2 ms."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeVar

from semel.render.media.source import LongString

__all__ = ["is_cheap", "run_if_heavy"]

_T = TypeVar("_T")

_MAX_TEXT_CHARS: Final = 8_192
_MAX_MEDIA_CHARS: Final = 1 << 20
_MAX_NODES: Final = 128


def is_cheap(*values: object) -> bool:
    """Return whether the JSON in these values has few nodes, little text, and only short data URLs."""
    text = media = nodes = 0
    pending: list[object] = list(values)
    while pending:
        value = pending.pop()
        nodes += 1
        if isinstance(value, str):
            if value.startswith("data:"):
                media += len(value)
            else:
                text += len(value)
        elif isinstance(value, LongString):
            media += len(value)
        elif isinstance(value, Mapping):
            pending += value.values()
        elif isinstance(value, Iterable):
            pending += value
        if nodes + len(pending) > _MAX_NODES or text > _MAX_TEXT_CHARS or media > _MAX_MEDIA_CHARS:
            return False
    return True


async def run_if_heavy(work: Callable[[], _T], *, light: bool) -> _T:
    """Run the work here if it is light, otherwise in a thread, where it does not block the event loop."""
    return work() if light else await asyncio.to_thread(work)
