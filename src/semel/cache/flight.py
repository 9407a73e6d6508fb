"""Equal work in flight is done once.

Whoever asks first leads: its work runs in a task of its own, and everyone who asks for the same key meanwhile joins it.
The task goes on while anybody waits, also when the leader has gone, and is cancelled when nobody does. An input's fault
(`RequestError`) is everyone's; any other failure is the leader's alone, and those who joined begin again. So a caller
fails only by work that it led itself, or by its input. Nothing is remembered: a failure is not cached, nor is a result.
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
    """One piece of work in the air, and how many wait for it."""

    task: asyncio.Task[_V]
    waiting: int = 0


class Flight(Generic[_K, _V]):
    """One computation per key at a time, shared by all who ask for it. It belongs to one event loop."""

    def __init__(self) -> None:
        self._flown: dict[_K, _Flown[_V]] = {}
        self._joined = 0

    @property
    def joined(self) -> int:
        """How many calls so far joined work that another had begun."""
        return self._joined

    def __len__(self) -> int:
        """How many pieces of work are in the air."""
        return len(self._flown)

    async def do(self, key: _K, work: Callable[[], Awaitable[_V]]) -> _V:
        """The result of `work`, or of equal work that is under way."""
        first = True
        while (flown := self._flown.get(key)) is not None:
            self._joined += first
            first = False
            try:
                return await self._wait(key, flown)
            except RequestError:
                raise
            except asyncio.CancelledError:
                if not flown.task.cancelled() or _is_cancelled():
                    raise
            except Exception:  # noqa: BLE001, S112 - the leader is told; this caller begins again
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
                if self._flown.get(key) is flown:  # who asks from now on begins anew
                    del self._flown[key]
                flown.task.cancel()


def _is_cancelled() -> bool:
    """Whether it is this caller that is being cancelled, not only the work it waits for."""
    caller = asyncio.current_task()
    return caller is not None and caller.cancelling() > 0
