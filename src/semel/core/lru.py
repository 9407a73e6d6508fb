"""A bounded map that evicts the least recently used entries. Every bounded map of semel uses it,
except the feature caches, whose room is shared between tenants.

The sum of the values' weights is bounded, and optionally the number of entries. No I/O, no clock, no lock: one thread
owns a map. Every call is O(1), plus the entries that it evicts.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, ItemsView, Iterator
from typing import Generic, TypeVar

__all__ = ["LruMap"]

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class LruMap(Generic[_K, _V]):
    """The most recently used values, by key.

    `weigh` returns a value's weight. A weight is at least zero and never changes. Without `weigh` each value weighs
    one, and `max_weight` is a number of entries. A value is never None.
    """

    __slots__ = ("_values", "_weigh", "max_entries", "max_weight", "weight")

    def __init__(
        self, max_weight: int, weigh: Callable[[_V], int] = lambda _: 1, *, max_entries: int = sys.maxsize
    ) -> None:
        self.max_weight = max_weight
        self.max_entries = max_entries
        self.weight = 0
        """Total weight of all values: never more than `max_weight`."""
        self._weigh = weigh
        self._values: OrderedDict[_K, _V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[_K]:
        """Return the keys, least recently used first."""
        return iter(self._values)

    def __repr__(self) -> str:
        return f"LruMap({len(self):,} entries, {self.weight:,} of {self.max_weight:,})"

    def items(self) -> ItemsView[_K, _V]:
        """Return the keys and values, least recently used first."""
        return self._values.items()

    def get(self, key: _K) -> _V | None:
        """Return the value of a key, which becomes the most recently used."""
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def peek(self, key: _K) -> _V | None:
        """Return the value of a key, without changing the order."""
        return self._values.get(key)

    def put(self, key: _K, value: _V) -> list[_K]:
        """Store or replace a value, as the most recently used. Returns the keys that were evicted.

        A value that does not fit even alone is not stored and evicts nothing else. The key's previous value is removed.
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
        """Remove and return a value."""
        value = self._values.pop(key, None)
        if value is not None:
            self.weight -= self._weigh(value)
        return value

    def clear(self) -> None:
        """Remove every value."""
        self._values.clear()
        self.weight = 0
