"""Long work on an event loop, in slices: others have their turn between two of them.

The work is a generator that yields wherever it may be interrupted, every few dozen microseconds at best. What it relies
on may change while it is interrupted, and it may be ended there: then it has to leave everything in order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from typing import Final, TypeVar

__all__ = ["SLICE_S", "at_once", "in_slices"]

SLICE_S: Final = 0.004
"""How long a slice takes."""

_T = TypeVar("_T")


async def in_slices(work: Generator[None, None, _T], slice_s: float = SLICE_S) -> _T:
    """Do the work, and let others have their turn between its slices."""
    try:
        while True:
            end = time.monotonic() + slice_s
            while time.monotonic() < end:
                next(work)
            await asyncio.sleep(0)
    except StopIteration as done:
        result: _T = done.value
        return result
    finally:
        work.close()


def at_once(work: Generator[None, None, _T]) -> _T:
    """Do the work without a pause: there is little of it."""
    try:
        while True:
            next(work)
    except StopIteration as done:
        result: _T = done.value
        return result
