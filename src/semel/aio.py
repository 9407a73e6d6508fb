"""Long work on an event loop, in slices: others have their turn between two of them.

The work is a generator that yields wherever it may be interrupted, every few dozen microseconds at best. What it relies
on may change while it is interrupted, and it may be ended there: then it has to leave everything in order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from typing import Any, Final, TypeVar

from semel.errors import SemelError

__all__ = ["SLICE_S", "at_once", "concurrently", "in_slices", "run_if_large", "to_the_end"]

SLICE_S: Final = 0.004
"""The length of a slice."""

_MAX_AT_ONCE: Final = 64
_LARGE_BYTES: Final = 1 << 20

_T = TypeVar("_T")


async def in_slices(work: Generator[None, None, _T], slice_s: float = SLICE_S) -> _T:
    """Do the work, and let others have their turn between its slices."""
    try:
        end = time.monotonic() + slice_s
        while True:
            next(work)
            if time.monotonic() >= end:
                await asyncio.sleep(0)
                end = time.monotonic() + slice_s
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


async def run_if_large(work: Callable[[], _T], nbytes: int) -> _T:
    """Return what work on so many bytes returns; over 1 MiB a thread does it, and the event loop goes on."""
    return work() if nbytes <= _LARGE_BYTES else await asyncio.to_thread(work)


async def to_the_end(work: Coroutine[Any, Any, _T]) -> _T:
    """Do work that nobody may break off half-way: who is cancelled meanwhile waits for its end first."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None and not task.cancelled() and task.exception() is None:
        raise cancelled
    return task.result()


async def concurrently(
    values: Iterable[_T], work: Callable[[_T], Awaitable[None]], *, at_once: int = _MAX_AT_ONCE
) -> None:
    """Run the work for all values, some at a time: a request with many items must not fill the pool's queue."""
    room = asyncio.Semaphore(at_once)

    async def do(value: _T) -> None:
        async with room:
            await work(value)

    try:
        async with asyncio.TaskGroup() as group:
            for value in values:
                group.create_task(do(value))
    except* SemelError as errors:
        raise errors.exceptions[0] from None
