"""Who is next: tenants take turns, within a tenant its groups, within a group the items in the order of arrival.

A group is what one request sends. So one that comes behind a request with two hundred items, or behind a thousand
requests of another tenant, waits for one item of theirs. A tenant or a group comes last when it begins to wait, and is
forgotten when nothing of it waits. Tenants that have used more are passed over, and so are those that may not begin now
(`shares`). The number of items is bounded: once all places are taken, a tenant within its share of them gets the place
of the newest item of the one that has the most. A step looks at the tenants that wait, never at their items. Pure: no
I/O.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from semel.fairness.shares import Shares

__all__ = ["FairQueue"]

_T = TypeVar("_T", bound=Hashable)


class _Line(Generic[_T]):
    """What waits of one tenant: its groups in the order of their turns, and all items in the order of arrival."""

    __slots__ = ("groups", "items")

    def __init__(self) -> None:
        self.groups: OrderedDict[Hashable, OrderedDict[_T, None]] = OrderedDict()
        self.items: OrderedDict[_T, Hashable] = OrderedDict()

    def add(self, group: Hashable, item: _T) -> None:
        self.groups.setdefault(group, OrderedDict())[item] = None
        self.items[item] = group

    def take(self) -> _T:
        group, items = next(iter(self.groups.items()))
        item = next(iter(items))
        self.remove(item)
        if items:
            self.groups.move_to_end(group)
        return item

    def remove(self, item: _T) -> None:
        group = self.items.pop(item)
        items = self.groups[group]
        del items[item]
        if not items:
            del self.groups[group]


class FairQueue(Generic[_T]):
    """What waits, each thing at most once, in the order in which it is taken turn by turn."""

    def __init__(self, max_items: int = sys.maxsize) -> None:
        self._lines: OrderedDict[str, _Line[_T]] = OrderedDict()
        self._places = Shares(max_items)

    def __len__(self) -> int:
        return self._places.total

    def __iter__(self) -> Iterator[_T]:
        """All that waits, tenant by tenant."""
        return (item for line in self._lines.values() for item in line.items)

    @property
    def is_full(self) -> bool:
        """Whether all places are taken."""
        return not self._places.fits(1)

    @property
    def tenants(self) -> dict[str, int]:
        """How many items wait of each tenant that has one waiting."""
        return {tenant: self._places[tenant] for tenant in self._lines}

    def yielding(self, tenant: str) -> _T | None:
        """Which item has to yield its place in a full queue to one of this tenant; None if the tenant has its share."""
        debtor = self._places.debtor(tenant, 1)
        return None if debtor is None else next(reversed(self._lines[debtor].items))

    def add(self, tenant: str, group: Hashable, item: _T) -> None:
        """Let an item wait, behind all others of its group. There has to be a place."""
        self._places.change(tenant, 1)
        if (line := self._lines.get(tenant)) is None:
            self._lines[tenant] = line = _Line()
        line.add(group, item)

    def next_tenant(self, used: Callable[[str], float], may_begin: Callable[[str], bool]) -> str | None:
        """The tenant that has used the least, of those that wait and may begin; of equals, the first in line."""
        return min(filter(may_begin, self._lines), key=used, default=None)

    def take(self, tenant: str | None = None) -> _T:
        """The next item, of this tenant if one is named; the turn of its group, and of its tenant, is over."""
        tenant = next(iter(self._lines)) if tenant is None else tenant
        line = self._lines[tenant]
        item = line.take()
        self._leave(tenant, line)
        if line.items:
            self._lines.move_to_end(tenant)
        return item

    def discard(self, tenant: str, item: _T) -> None:
        """Let an item wait no more, if it does."""
        line = self._lines.get(tenant)
        if line is not None and item in line.items:
            line.remove(item)
            self._leave(tenant, line)

    def clear(self) -> None:
        """Let nothing wait."""
        self._lines.clear()
        self._places = Shares(self._places.capacity)

    def _leave(self, tenant: str, line: _Line[_T]) -> None:
        self._places.change(tenant, -1)
        if not line.items:
            del self._lines[tenant]
