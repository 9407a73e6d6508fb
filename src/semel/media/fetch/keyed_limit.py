"""A concurrency limit with a share for each key, independent of the number of other keys (threats S18).

Callers that wait for the same key are served in order. Work that begins under a permit may outlast its owner, such as a
name lookup in a busy thread: a permit ends with its last holder. A key without holders or waiters is removed. It
belongs to one event loop and does no I/O.
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
    """The right to use one slot; it lasts while it has a holder. Made by `KeyedLimit.take`."""

    __slots__ = ("_end", "_holders", "_is_over")

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end
        self._holders = 0
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """Whether the slot is released."""
        return self._is_over

    @contextmanager
    def current(self) -> Iterator[None]:
        """Hold the permit; everything that begins in this context can find it."""
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
"""A context variable, because a client library is between the owner of a permit and its users."""


def outlasting() -> AbstractContextManager[None]:
    """Hold the permit of the current context, whether or not its owner still does."""
    turn = _CURRENT.get()
    return nullcontext() if turn is None or turn.is_over else turn


@dataclass(slots=True, eq=False)
class _Line:
    """The slots of one key, and its holders and waiters."""

    room: asyncio.Semaphore
    users: int = 0


class KeyedLimit(Generic[_K]):
    """A limited number of permits at a time for each key."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._lines: dict[_K, _Line] = {}

    def __len__(self) -> int:
        """Number of keys with a holder or a waiter."""
        return len(self._lines)

    async def take(self, key: _K) -> Permit:
        """Wait for a permit. The caller must enter it."""
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
