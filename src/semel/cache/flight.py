"""Single flight: equal work runs once at a time.

The first caller for a key leads: its work runs in a task of its own, and later callers for the same key join the task.
The task continues while any caller waits, even after the leader is gone. It is cancelled when no caller waits. A
`RequestError`, which the input causes, reaches every caller. Any other failure reaches only the leader; callers that
joined start again. So a caller fails only because of work that it led or because of its input. Nothing is stored:
neither failures nor results are cached.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from semel.errors import RequestError

__all__ = ["Flight"]

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


@dataclass(slots=True, eq=False)
class _Flown(Generic[_V]):
    """One task, and the number of callers that wait for it."""

    task: asyncio.Task[_V]
    waiting: int = 0


class Flight(Generic[_K, _V]):
    """One computation per key at a time, shared by all callers. It belongs to one event loop."""

    def __init__(self) -> None:
        self._flown: dict[_K, _Flown[_V]] = {}
        self.joined = 0
        """Number of calls so far that joined another call's work."""

    def __len__(self) -> int:
        """Number of tasks in flight."""
        return len(self._flown)

    async def do(self, key: _K, work: Callable[[], Awaitable[_V]]) -> _V:
        """Return the result of `work`, or of equal work in flight."""
        first = True
        while (flown := self._flown.get(key)) is not None:
            self.joined += first
            first = False
            try:
                return await self._wait(key, flown)
            except RequestError:
                raise
            except asyncio.CancelledError:
                if not flown.task.cancelled() or _is_cancelled():
                    raise
            except Exception:  # noqa: BLE001, S112 - the leader raises it; this caller starts again
                continue
        flown = self._flown[key] = _Flown(asyncio.create_task(self._fly(key, work)))
        return await self._wait(key, flown)

    async def _fly(self, key: _K, work: Callable[[], Awaitable[_V]]) -> _V:
        me = asyncio.current_task()
        try:
            return await work()
        finally:
            if (flown := self._flown.get(key)) is not None and flown.task is me:
                del self._flown[key]

    async def _wait(self, key: _K, flown: _Flown[_V]) -> _V:
        flown.waiting += 1
        try:
            return await asyncio.shield(flown.task)
        finally:
            flown.waiting -= 1
            if not flown.waiting and not flown.task.done():
                if self._flown.get(key) is flown:  # later callers start new work
                    del self._flown[key]
                flown.task.cancel()


def _is_cancelled() -> bool:
    """Return whether this caller is cancelled, not only the work that it waits for."""
    caller = asyncio.current_task()
    return caller is not None and caller.cancelling() > 0
