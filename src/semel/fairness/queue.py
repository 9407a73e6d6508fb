"""Fair queueing: whose item is next, and which one yields when all places are taken. Pure: the clock is passed in.

Each tenant has a counter of what it has used: tokens of an engine, CPU time of processes. The tenant with the smallest
counter is next (virtual token counters). One that begins to wait gets at least the smallest counter of those that wait,
or that of the tenant whose turn it was last: to have been idle earns nothing, and to have been busy alone costs
nothing. Of equal counters the one that began to wait last is first, then the one whose turn was longest ago.

Within a tenant its groups take turns, in order of priority; within a group items go in the order of arrival. A group is
what one request sends: one that comes behind a request with two hundred items waits for one of them. The number of
items is bounded: once all places are taken, a tenant within its share of them gets the place of the newest item of the
one that has the most.

A decision costs the same however many tenants and items wait: a tenant's place in the order only falls while it waits,
so a heap is corrected where it is read. Only one that begins to wait may move forward; then it gets another entry, and
the old one is void.
"""

from __future__ import annotations

import sys
import time
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, Generic, TypeVar

from semel.fairness.shares import Shares

__all__ = ["FairQueue", "WaitingTenant"]

_T = TypeVar("_T", bound=Hashable)

_ABOUT_S: Final = 600.0  # after its last item a tenant is thought to come back
_VOID_ENTRIES: Final = 64  # that the heap may have on top of two for each tenant, before the void ones are dropped


class WaitingTenant(Generic[_T]):
    """A tenant that has asked lately: its counter, and its items that wait."""

    __slots__ = ("_entry", "_groups", "_order", "_rank", "_seen_s", "items", "lost", "name", "running", "used")

    def __init__(self, name: str) -> None:
        self.name = name
        self.used: float = 0  # the counter; it only grows
        self.running = 0  # of its items that have their turn; the queue's user counts them
        self.lost = 0  # slots that its items have broken, and that are not repaired; the queue's user counts them too
        self.items: OrderedDict[_T, Hashable] = OrderedDict()  # in the order of arrival, with the group of each
        self._groups: dict[Hashable, tuple[tuple[int, int, Hashable], OrderedDict[_T, None]]] = {}
        self._order: list[tuple[int, int, Hashable]] = []  # the groups by priority, and in the order of their turns
        self._rank = 0
        self._seen_s = 0.0
        self._entry: tuple[float, int, WaitingTenant[_T]] | None = None  # the one in the heap that counts

    @property
    def next_item(self) -> _T:
        """The item that is next; there must be one."""
        return next(iter(self._groups[self._order[0][2]][1]))

    def _add(self, item: _T, group: Hashable, priority: int, number: int) -> None:
        self.items[item] = group
        if (known := self._groups.get(group)) is None:
            place = (priority, number, group)
            known = self._groups[group] = place, OrderedDict()
            insort(self._order, place)
        known[1][item] = None

    def _remove(self, item: _T) -> None:
        group = self.items.pop(item)
        place, items = self._groups[group]
        del items[item]
        if not items:
            del self._groups[group]
            del self._order[bisect_left(self._order, place)]

    def _take(self, number: int) -> _T:
        priority, _, group = self._order.pop(0)
        items = self._groups[group][1]
        item, _ = items.popitem(last=False)
        del self.items[item]
        if items:
            place = (priority, number, group)
            self._groups[group] = place, items
            insort(self._order, place)
        else:
            del self._groups[group]
        return item


class FairQueue(Generic[_T]):
    """Items that wait, each at most once."""

    def __init__(self, max_items: int = sys.maxsize, now: Callable[[], float] = time.monotonic) -> None:
        self.places = Shares(max_items)
        """The number of items of each tenant that waits."""
        self._now = now
        self._numbers = 0
        self._tenants: dict[str, WaitingTenant[_T]] = {}  # in the order in which they asked last
        # An entry of each tenant that waits, and of some that do not any more; and void ones.
        self._heap: list[tuple[float, int, WaitingTenant[_T]]] = []
        self._last: WaitingTenant[_T] | None = None  # it had the last turn

    def __len__(self) -> int:
        return self.places.total

    def __iter__(self) -> Iterator[_T]:
        """Yield all that waits, tenant by tenant."""
        return (item for tenant in self._tenants.values() for item in tenant.items)

    @property
    def is_full(self) -> bool:
        """Return whether all places are taken."""
        return not self.places.fits(1)

    @property
    def about(self) -> int:
        """The number of tenants that have something, or have asked within ten minutes."""
        return len(self._tenants)

    def yielding(self, tenant: str) -> _T | None:
        """Return the item that yields its place in a full queue to one of this tenant; None if it has its share."""
        debtor = self.places.debtor(tenant, 1)
        return None if debtor is None else next(reversed(self._tenants[debtor].items))

    def add(self, name: str, group: Hashable, item: _T, priority: int = 0) -> WaitingTenant[_T]:
        """Let an item wait, behind all others of its group. There has to be a place. The lowest priority is first."""
        self.places.change(name, 1)
        tenant = self._see(name)
        self._numbers += 1
        if not tenant.items:
            first = (self.first() if self._heap else None) or self._last
            if first is not None and first.used > tenant.used:
                tenant.used = first.used
            tenant._rank = -self._numbers
        tenant._add(item, group, priority, self._numbers)
        self._list(tenant)
        return tenant

    def first(self) -> WaitingTenant[_T] | None:
        """Return the tenant whose turn it is: it has an item, and the first entry is as it should be."""
        heap = self._heap
        while heap:
            entry = heap[0]
            tenant = entry[2]
            if tenant._entry is not entry:
                heappop(heap)
            elif not tenant.items:
                heappop(heap)
                tenant._entry = None
            elif entry[0] != tenant.used or entry[1] != tenant._rank:
                tenant._entry = (tenant.used, tenant._rank, tenant)
                heapreplace(heap, tenant._entry)
            else:
                return tenant
        return None

    def skip(self, tenant: WaitingTenant[_T]) -> WaitingTenant[_T]:
        """Pass over the first tenant, until it is restored."""
        heappop(self._heap)
        tenant._entry = None
        return tenant

    def restore(self, skipped: Iterable[WaitingTenant[_T]]) -> None:
        """Let tenants have their turns again that were passed over."""
        for tenant in skipped:
            self._list(tenant)

    def next_for(self, slots: int) -> WaitingTenant[_T] | None:
        """Return the tenant whose turn it is at one of `slots`: while others are about, none has the last of them too.

        An expensive item keeps its slot, and nothing is preempted (threats S29). While others are about, a tenant has
        the slots too that its items have broken (threats S6).
        """
        shared = self.about > 1
        most, skipped = max(1, slots - shared), list[WaitingTenant[_T]]()
        while (tenant := self.first()) is not None and tenant.running + shared * tenant.lost >= most:
            skipped.append(self.skip(tenant))
        self.restore(skipped)
        return tenant

    def take(self, tenant: WaitingTenant[_T]) -> _T:
        """Take the next item of a tenant that has one; its turn, and that of its group, is over."""
        self._numbers += 1
        self._last, tenant._rank = tenant, self._numbers
        self.places.change(tenant.name, -1)
        return tenant._take(self._numbers)

    def discard(self, name: str, item: _T) -> None:
        """Let an item wait no more, if it does."""
        tenant = self._tenants.get(name)
        if tenant is not None and item in tenant.items:
            tenant._remove(item)
            self.places.change(name, -1)

    def clear(self) -> None:
        """Let nothing wait."""
        for tenant in self._tenants.values():
            for item in list(tenant.items):
                self.discard(tenant.name, item)

    def _list(self, tenant: WaitingTenant[_T]) -> None:
        entry = (tenant.used, tenant._rank, tenant)
        if tenant._entry is None or entry < tenant._entry:
            tenant._entry = entry
            heappush(self._heap, entry)
            if len(self._heap) > 2 * len(self._tenants) + _VOID_ENTRIES:
                self._drop_void_entries()

    def _drop_void_entries(self) -> None:
        kept = []
        for entry in self._heap:
            if (tenant := entry[2])._entry is entry:
                if tenant.items:
                    kept.append(entry)
                else:
                    tenant._entry = None
        heapify(kept)
        self._heap = kept

    def _see(self, name: str) -> WaitingTenant[_T]:
        now_s = self._now()
        tenant = self._tenants.pop(name, None) or WaitingTenant(name)
        tenant._seen_s = now_s
        self._tenants[name] = tenant
        while (oldest := next(iter(self._tenants.values())))._seen_s < now_s - _ABOUT_S:
            del self._tenants[oldest.name]
            if oldest.items or oldest.running:
                oldest._seen_s = now_s
                self._tenants[oldest.name] = oldest
        return tenant
