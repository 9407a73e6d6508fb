"""When something has to be done for which of many: a heap of times. Pure, the time is passed in.

A time that is replaced stays in the heap until it is reached, or until such times are most of it: setting one costs a
push, and nobody is looked at before its time.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import Final, Generic, TypeVar

__all__ = ["Timers"]

_K = TypeVar("_K", bound=Hashable)
_FEW: Final = 64


class Timers(Generic[_K]):
    """One time for each key."""

    def __init__(self) -> None:
        self._times: dict[_K, float] = {}
        self._heap: list[tuple[float, int, _K]] = []
        self._numbers = count()  # keys need no order

    def __len__(self) -> int:
        return len(self._times)

    @property
    def next(self) -> float:
        """The earliest time; infinity if there is none."""
        while self._heap and self._is_stale(self._heap[0]):
            heappop(self._heap)
        return self._heap[0][0] if self._heap else inf

    def set(self, key: _K, when: float) -> None:
        """The key is due at this time, and not at the one before."""
        if self._times.get(key) != when:
            self._times[key] = when
            heappush(self._heap, (when, next(self._numbers), key))
            if len(self._heap) > 2 * len(self._times) + _FEW:
                self._heap = [entry for entry in self._heap if not self._is_stale(entry)]
                heapify(self._heap)

    def discard(self, key: _K) -> None:
        """The key is never due."""
        self._times.pop(key, None)

    def pop_due(self, now: float) -> list[_K]:
        """The keys whose time has come, earliest first. They have no time until they get another."""
        due = []
        while self.next <= now and self._heap:
            _, _, key = heappop(self._heap)
            del self._times[key]
            due.append(key)
        return due

    def _is_stale(self, entry: tuple[float, int, _K]) -> bool:
        return self._times.get(entry[2]) != entry[0]
