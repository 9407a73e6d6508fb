"""Turns: so many at a time for each who asks, however many the others are (threats S18).

Those who wait for the same key go in the order in which they came. What is begun in a turn may outlast it, as a lookup
of a name does that a thread is busy with: a turn ends when the last who holds it lets go. A key that nobody holds or
waits for is forgotten. It belongs to one event loop, and does no I/O.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, TypeVar

__all__ = ["KeyedLimit", "Permit", "outlasting"]

_K = TypeVar("_K", bound=Hashable)


class Permit:
    """One turn; it lasts for as long as somebody is in it. Made by `KeyedLimit.take`."""

    __slots__ = ("_end", "_holders", "_is_over")

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end
        self._holders = 0
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """Whether it is somebody else's turn by now."""
        return self._is_over

    @contextmanager
    def current(self) -> Iterator[None]:
        """Be in the turn, with everything that is begun meanwhile."""
        token = _CURRENT.set(self)
        try:
            with self:
                yield
        finally:
            _CURRENT.reset(token)

    def __enter__(self) -> None:
        self._holders += 1

    def __exit__(self, *_: object) -> None:
        self._holders -= 1
        if not self._holders:
            self._is_over = True
            self._end()


_CURRENT: Final[ContextVar[Permit | None]] = ContextVar("turn", default=None)
"""A client library stands between who takes a turn and what is done in it."""


def outlasting() -> AbstractContextManager[None]:
    """Hold the turn in which this was begun, whether or not who took it is still there."""
    turn = _CURRENT.get()
    return nullcontext() if turn is None or turn.is_over else turn


@dataclass(slots=True, eq=False)
class _Line:
    """Those with one key."""

    room: asyncio.Semaphore
    users: int = 0


class KeyedLimit(Generic[_K]):
    """So many turns at a time for each key."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._lines: dict[_K, _Line] = {}

    def __len__(self) -> int:
        """How many keys have somebody who holds a turn or waits for one."""
        return len(self._lines)

    async def take(self, key: _K) -> Permit:
        """Wait for a turn. It has to be entered."""
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line(asyncio.Semaphore(self._at_once))
        line.users += 1
        try:
            await line.room.acquire()
        except BaseException:
            self._leave(key, line)
            raise
        return Permit(partial(self._end, key, line))

    def _end(self, key: _K, line: _Line) -> None:
        line.room.release()
        self._leave(key, line)

    def _leave(self, key: _K, line: _Line) -> None:
        line.users -= 1
        if not line.users:
            del self._lines[key]
