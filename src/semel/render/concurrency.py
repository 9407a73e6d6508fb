"""Runs the same work for many values, with limited concurrency."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar

from semel.errors import SemelError

__all__ = ["concurrently"]

_MAX_AT_ONCE: Final = 64

_T = TypeVar("_T")


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
