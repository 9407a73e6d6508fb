"""Eviction from a cache of features, by tenant. Pure: no I/O, and the clock is passed in.

The features of one tenant go in the order of their use, least recent first. Whose go, while a tenant needs room:

1. those of a tenant that has not used the cache for ten minutes: it asks for nothing, so it is entitled to no share; 2.
else those of the tenant that has the most, if that is more than an equal share and more than the tenant would then
have; 3. else its own.

So a tenant has everything while it is alone, loses nothing to others while it has no more than its share, and who
floods a cache evicts its own features. What could not be stored in the end evicts nothing.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heapreplace
from typing import Final

from semel.core import Digest
from semel.fairness.shares import Shares

__all__ = ["IDLE_S", "Room"]

IDLE_S: Final = 600.0
"""A tenant that has used nothing for so long is entitled to no share."""


class _Line:
    """The features of one tenant that can be evicted, least recently used first."""

    __slots__ = ("digests", "used_s")

    def __init__(self) -> None:
        self.digests: OrderedDict[Digest, None] = OrderedDict()
        self.used_s = 0.0


class Room:
    """The bytes of a cache by tenant, and the order in which features go.

    Bytes are a tenant's from `charge` to `release`, whether they can be evicted or not. Features can be evicted from
    `add` to `remove`. Every step is O(1); those that look for room look once at every tenant that has some.
    """

    __slots__ = ("_clock", "_idle_s", "_lines", "_shares")

    def __init__(self, capacity: int, clock: Callable[[], float] = time.monotonic, *, idle_s: float = IDLE_S) -> None:
        self._clock = clock
        self._idle_s = idle_s
        self._shares = Shares(capacity)
        self._lines: dict[str, _Line] = {}  # of the tenants that have bytes

    def __repr__(self) -> str:
        return f"Room({self._shares!r})"

    @property
    def capacity(self) -> int:
        """All bytes."""
        return self._shares.capacity

    def resize(self, capacity: int) -> None:
        """Change all bytes, to no less than tenants have."""
        assert capacity >= self.nbytes, "less than tenants have"
        self._shares.capacity = capacity

    @property
    def nbytes(self) -> int:
        """The bytes that all tenants have."""
        return self._shares.total

    def nbytes_of(self, tenant: str) -> int:
        """Return the bytes that a tenant has."""
        return self._shares[tenant]

    def fits(self, nbytes: int) -> bool:
        """Return whether so many bytes are free."""
        return self._shares.fits(nbytes)

    def charge(self, tenant: str, nbytes: int) -> None:
        """Charge a tenant for bytes, which must be free."""
        self._shares.add(tenant, nbytes)
        if (line := self._lines.get(tenant)) is None:
            line = self._lines[tenant] = _Line()
        line.used_s = self._clock()

    def release(self, tenant: str, nbytes: int) -> None:
        """Give bytes of a tenant back."""
        self._shares.release(tenant, nbytes)
        if not self._shares[tenant]:
            del self._lines[tenant]

    def add(self, tenant: str, digest: Digest) -> None:
        """Add a feature that can be evicted, as the most recently used of its tenant."""
        self._lines[tenant].digests[digest] = None

    def use(self, tenant: str, digest: Digest) -> None:
        """Make a feature that can be evicted the most recently used of its tenant."""
        line = self._lines[tenant]
        line.used_s = self._clock()
        line.digests.move_to_end(digest)

    def touch(self, tenant: str) -> None:
        """Take note that a tenant uses a feature that cannot be evicted."""
        self._lines[tenant].used_s = self._clock()

    def remove(self, tenant: str, digest: Digest) -> None:
        """Remove a feature that cannot be evicted, because it is in use or gone."""
        self._lines[tenant].digests.pop(digest, None)

    def can_have(self, tenant: str, nbytes: int) -> bool:
        """Return whether so many bytes become free for a tenant, once everybody has yielded what it has to."""
        if nbytes <= self._shares.share(tenant):
            return True
        since_s = self._clock() - self._idle_s
        lines = self._lines.items()
        others = [self._shares[other] for other, line in lines if other != tenant and line.used_s >= since_s]
        return nbytes + sum(min(amount, nbytes) for amount in others) <= self._shares.capacity

    def victims(self, tenant: str, nbytes: int) -> Iterator[Digest]:
        """Yield the features that go, one by one, until a tenant can have so many bytes.

        A caller that takes one of them has removed it by the time it takes the next.
        """
        shares, own = self._shares, self._lines.get(tenant)
        largest: list[tuple[int, str]] = []
        if self.has_others(tenant):
            for line in self._idle_lines(tenant):
                while line.digests:
                    yield next(iter(line.digests))
            largest = [(-shares[other], other) for other in self._lines if other != tenant]
            heapify(largest)
        while True:
            if largest and -largest[0][0] > max(shares[tenant] + nbytes, shares.share(tenant)):
                amount, other = largest[0]
                if shares[other] != -amount:  # it has yielded some
                    heapreplace(largest, (-shares[other], other))
                elif digests := self._lines[other].digests:
                    yield next(iter(digests))
                else:
                    heappop(largest)
            elif own is not None and own.digests:
                yield next(iter(own.digests))
            else:
                return

    def protected(self, tenant: str, nbytes: int) -> Iterator[Digest]:
        """Yield the features that do not go, whatever else a tenant needs so many bytes for."""
        limit, since_s = max(nbytes, self._shares.share(tenant)), self._clock() - self._idle_s
        for other, line in self._lines.items():
            if other != tenant and line.used_s >= since_s and self._shares[other] <= limit:
                yield from line.digests

    def has_others(self, tenant: str) -> bool:
        """Return whether another tenant has bytes."""
        return len(self._lines) > (tenant in self._lines)

    def _idle_lines(self, tenant: str) -> list[_Line]:
        """Return the lines of other tenants that are entitled to nothing, those that were used longest ago first."""
        since_s = self._clock() - self._idle_s
        idle = [line for other, line in self._lines.items() if other != tenant and line.used_s < since_s]
        return sorted(idle, key=lambda line: line.used_s)
