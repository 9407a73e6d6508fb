"""LRU eviction with shares of tenants. Pure: the clock is passed in.

The entries of one tenant go in the order of their use, least recent first. Whose go, while a tenant needs room:

1. those of a tenant that has not used the cache for ten minutes: it asks for nothing, so it is entitled to no share;
2. else those of the tenant that has the most, if that is more than an equal share and more than the tenant would have;
3. else its own.

So a tenant has everything while it is alone, loses nothing to others while it has no more than its share, and one that
floods a cache evicts its own entries. What could not be stored in the end evicts nothing.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heapreplace
from typing import Final, Generic, TypeVar

from semel.fairness.shares import Shares

__all__ = ["IDLE_S", "TenantLru"]

_K = TypeVar("_K", bound=Hashable)

IDLE_S: Final = 600.0
"""A tenant that has used nothing for so long is entitled to no share."""


class _Line(Generic[_K]):
    """The entries of one tenant that can be evicted, least recently used first."""

    __slots__ = ("keys", "used_s")

    def __init__(self) -> None:
        self.keys: OrderedDict[_K, None] = OrderedDict()
        self.used_s = 0.0


class TenantLru(Generic[_K]):
    """The bytes of a cache by tenant, and the order in which entries go.

    Bytes are a tenant's from `charge` to `release`, whether they can be evicted or not. Entries can be evicted from
    `add` to `remove`. Every step is O(1); those that look for room look once at every tenant that has some.
    """

    __slots__ = ("_clock", "_idle_s", "_lines", "shares")

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic, *, idle_s: float = IDLE_S) -> None:
        self._clock = clock
        self._idle_s = idle_s
        self.shares = Shares(capacity)  # bytes
        self._lines: dict[str, _Line[_K]] = {}  # of the tenants that have bytes

    def __repr__(self) -> str:
        return f"TenantLru({self.shares!r})"

    def resize(self, capacity: int) -> None:
        """Change all bytes, to no less than tenants have."""
        assert capacity >= self.shares.total, "less than tenants have"
        self.shares.capacity = capacity

    def charge(self, tenant: str, nbytes: int) -> None:
        """Give a tenant so many bytes more, which have to be free."""
        self.shares.change(tenant, nbytes)
        if (line := self._lines.get(tenant)) is None:
            line = self._lines[tenant] = _Line()
        line.used_s = self._clock()

    def release(self, tenant: str, nbytes: int) -> None:
        """Take so many bytes from a tenant."""
        self.shares.change(tenant, -nbytes)
        if not self.shares[tenant]:
            del self._lines[tenant]

    def add(self, tenant: str, key: _K) -> None:
        """Let an entry be evicted, as the most recently used of its tenant."""
        self._lines[tenant].keys[key] = None

    def use(self, tenant: str, key: _K) -> None:
        """Note the use of an entry that can be evicted: it becomes its tenant's most recently used."""
        line = self._lines[tenant]
        line.used_s = self._clock()
        line.keys.move_to_end(key)

    def touch(self, tenant: str) -> None:
        """Note the use of an entry that cannot be evicted."""
        self._lines[tenant].used_s = self._clock()

    def remove(self, tenant: str, key: _K) -> None:
        """Let an entry not be evicted, because it is in use or gone."""
        self._lines[tenant].keys.pop(key, None)

    def can_have(self, tenant: str, nbytes: int) -> bool:
        """Return whether so many bytes become free for a tenant, once everybody has yielded what it has to."""
        if nbytes <= self.shares.share(tenant):
            return True
        since_s = self._clock() - self._idle_s
        lines = self._lines.items()
        others = [self.shares[other] for other, line in lines if other != tenant and line.used_s >= since_s]
        return nbytes + sum(min(amount, nbytes) for amount in others) <= self.shares.capacity

    def victims(self, tenant: str, nbytes: int) -> Iterator[_K]:
        """Yield the entries that go, one by one, until a tenant can have so many bytes.

        A caller that takes one of them has removed it by the time it takes the next.
        """
        shares, own = self.shares, self._lines.get(tenant)
        largest: list[tuple[int, str]] = []
        if self.has_others(tenant):
            for line in self._idle_lines(tenant):
                while line.keys:
                    yield next(iter(line.keys))
            largest = [(-shares[other], other) for other in self._lines if other != tenant]
            heapify(largest)
        while True:
            if largest and -largest[0][0] > max(shares[tenant] + nbytes, shares.share(tenant)):
                amount, other = largest[0]
                if shares[other] != -amount:  # it has yielded some
                    heapreplace(largest, (-shares[other], other))
                elif keys := self._lines[other].keys:
                    yield next(iter(keys))
                else:
                    heappop(largest)
            elif own is not None and own.keys:
                yield next(iter(own.keys))
            else:
                return

    def protected(self, tenant: str, nbytes: int) -> Iterator[_K]:
        """Yield the entries that do not go, whatever else a tenant needs so many bytes for."""
        limit, since_s = max(nbytes, self.shares.share(tenant)), self._clock() - self._idle_s
        for other, line in self._lines.items():
            if other != tenant and line.used_s >= since_s and self.shares[other] <= limit:
                yield from line.keys

    def has_others(self, tenant: str) -> bool:
        """Return whether another tenant has bytes."""
        return len(self._lines) > (tenant in self._lines)

    def _idle_lines(self, tenant: str) -> list[_Line[_K]]:
        """Return the lines of other tenants that are entitled to nothing, least recently used first."""
        since_s = self._clock() - self._idle_s
        idle = [line for other, line in self._lines.items() if other != tenant and line.used_s < since_s]
        return sorted(idle, key=lambda line: line.used_s)
