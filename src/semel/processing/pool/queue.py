"""Who is next: items wait in groups, and groups take turns.

A group is what one request sends. Within a group the order is that of arrival; between groups one item each in turn, so
that a request with two hundred items and a request with one wait for each other for one item, not for two hundred. A
group comes last when it begins to wait, and is forgotten when nothing of it waits. Every step is O(1). Pure: no I/O.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

__all__ = ["FairQueue"]

_T = TypeVar("_T", bound=Hashable)


class FairQueue(Generic[_T]):
    """What waits, each thing at most once, in the order in which it is taken turn by turn."""

    def __init__(self) -> None:
        self._groups: OrderedDict[Hashable, OrderedDict[_T, None]] = OrderedDict()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[_T]:
        """All that waits, group by group."""
        return (waiting for group in self._groups.values() for waiting in group)

    def add(self, group: Hashable, item: _T) -> None:
        """Let an item wait, behind all others of its group."""
        self._groups.setdefault(group, OrderedDict())[item] = None
        self._length += 1

    def take(self) -> _T:
        """The next item; its group's turn is over."""
        group, items = next(iter(self._groups.items()))
        item, _ = items.popitem(last=False)
        self._length -= 1
        if items:
            self._groups.move_to_end(group)
        else:
            del self._groups[group]
        return item

    def put_back(self, group: Hashable, item: _T) -> None:
        """Let an item that was taken be the next one: nothing came of its turn."""
        items = self._groups.setdefault(group, OrderedDict())
        items[item] = None
        items.move_to_end(item, last=False)
        self._groups.move_to_end(group, last=False)
        self._length += 1

    def discard(self, group: Hashable, item: _T) -> None:
        """Let an item wait no more, if it does."""
        items = self._groups.get(group)
        if items is None or item not in items:
            return
        del items[item]
        self._length -= 1
        if not items:
            del self._groups[group]

    def clear(self) -> None:
        """Let nothing wait."""
        self._groups.clear()
        self._length = 0
