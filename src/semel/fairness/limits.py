"""A limit on slots or bytes with a share for each key, independent of the number of other keys (threats S18).

Callers that wait for the same key are served in order. A key that has nothing may take any amount at once: what is
larger than the limit has to be alone. Work that begins under a permit may outlast its owner, such as a name lookup in a
busy thread: a permit ends with its last holder. A key without holders or waiters is removed. It belongs to one event
loop and does no I/O.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Generic, TypeVar

__all__ = ["KeyedLimit", "Permit", "outlasting"]

_K = TypeVar("_K", bound=Hashable)


class Permit:
    """The right to use one slot; it lasts while it has a holder. Made by `KeyedLimit.permit`."""

    __slots__ = ("_end", "_holders", "is_over")

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end
        self._holders = 0
        self.is_over = False  # the slot is released

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
            self.is_over = True
            self._end()


_CURRENT: Final[ContextVar[Permit | None]] = ContextVar("semel_permit", default=None)
"""A context variable, because a client library is between the owner of a permit and its users."""


def outlasting() -> AbstractContextManager[None]:
    """Hold the permit of the current context, whether or not its owner still does."""
    permit = _CURRENT.get()
    return nullcontext() if permit is None or permit.is_over else permit


@dataclass(slots=True, eq=False)
class _Line:
    """The amount that one key has, and who waits for more."""

    amount: int = 0
    waiting: dict[asyncio.Future[None], int] = field(default_factory=dict)


class KeyedLimit(Generic[_K]):
    """A limited amount at a time for each key."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lines: dict[_K, _Line] = {}

    def __getitem__(self, key: _K) -> int:
        """Return the amount that a key has."""
        line = self._lines.get(key)
        return 0 if line is None else line.amount

    def __len__(self) -> int:
        """Number of keys with a holder or a waiter."""
        return len(self._lines)

    async def permit(self, key: _K) -> Permit:
        """Wait for a permit for one slot. The caller must enter it."""
        await self.take(key)
        return Permit(partial(self.release, key))

    async def take(self, key: _K, amount: int = 1) -> None:
        """Wait for an amount. The caller must release it."""
        if not amount:
            return
        turn = asyncio.get_running_loop().create_future()
        line = self._lines.setdefault(key, _Line())
        line.waiting[turn] = amount
        self._serve(key, line)
        try:
            await turn
        except BaseException:
            if line.waiting.pop(turn, None) is None:  # it was its own already
                self.release(key, amount)
            else:
                self._serve(key, line)
            raise

    def release(self, key: _K, amount: int = 1) -> None:
        """Give back what a key has taken."""
        if amount:
            line = self._lines[key]
            line.amount -= amount
            self._serve(key, line)

    def _serve(self, key: _K, line: _Line) -> None:
        while line.waiting:
            turn, amount = next(iter(line.waiting.items()))
            if line.amount and line.amount + amount > self._limit:
                return
            del line.waiting[turn]
            line.amount += amount
            if not turn.cancelled():
                turn.set_result(None)
        if not line.amount:
            del self._lines[key]

    def __repr__(self) -> str:
        return f"KeyedLimit({len(self):,} keys of {self._limit:,})"
