"""A map that is bounded, where the least recently used goes first: what every bounded map of semel is made of.

Bounded by the sum of its values' weights, and in entries if that is asked for as well. No I/O, no clock, no lock: it
belongs to one thread. Every call is O(1), but for the entries that make room.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, ItemsView, Iterator
from typing import Generic, TypeVar

__all__ = ["LruMap"]

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


def _one(_: object) -> int:
    return 1


class LruMap(Generic[_K, _V]):
    """Values by key, the most recently used ones.

    `weigh` gives a value's weight: not below zero, and of one value always the same. Without it each weighs one, and
    `max_weight` is a number of entries. No value is None.
    """

    __slots__ = ("_values", "_weigh", "max_entries", "max_weight", "weight")

    def __init__(self, max_weight: int, weigh: Callable[[_V], int] = _one, *, max_entries: int = sys.maxsize) -> None:
        self.max_weight = max_weight
        self.max_entries = max_entries
        self.weight = 0
        """Of all values together: never more than `max_weight`."""
        self._weigh = weigh
        self._values: OrderedDict[_K, _V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[_K]:
        """The keys, the least recently used first."""
        return iter(self._values)

    def __repr__(self) -> str:
        return f"LruMap({len(self):,} entries, {self.weight:,} of {self.max_weight:,})"

    def items(self) -> ItemsView[_K, _V]:
        """The keys and their values, the least recently used first."""
        return self._values.items()

    def get(self, key: _K) -> _V | None:
        """The value under a key, which becomes the most recently used."""
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def peek(self, key: _K) -> _V | None:
        """The value under a key, which stays where it is in the order."""
        return self._values.get(key)

    def put(self, key: _K, value: _V) -> list[_K]:
        """Put a value in the place of the one before, as the most recently used; returns the keys that made room.

        A value that would not fit even alone is left out, and nothing makes room for it; the one before is gone.
        """
        self.pop(key)
        weight = self._weigh(value)
        if weight > self.max_weight or self.max_entries < 1:
            return []
        evicted = []
        while self.weight + weight > self.max_weight or len(self._values) >= self.max_entries:
            oldest, its = self._values.popitem(last=False)
            self.weight -= self._weigh(its)
            evicted.append(oldest)
        self._values[key] = value
        self.weight += weight
        return evicted

    def pop(self, key: _K) -> _V | None:
        """Take a value out."""
        value = self._values.pop(key, None)
        if value is not None:
            self.weight -= self._weigh(value)
        return value

    def clear(self) -> None:
        """Take every value out."""
        self._values.clear()
        self.weight = 0
