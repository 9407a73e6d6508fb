"""The directory: which workers of a frontend have which items, one map for all of them (D1, D2).

Every worker has a number, and a set of workers is an integer with a bit for each. So who has an item is one lookup,
however many workers there are, and sets of workers are joined and counted by operations on integers. A worker has an
item for one of three reasons, each in a map of its own: it announced it, it was sent it, or a request with it is being
prepared for it. The parts of one worker (`Ledger`, and what is being prepared for it) keep these maps up to date.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

from semel.core import Digest

__all__ = ["Directory", "Holders"]


class Holders:
    """Sets of workers by digest."""

    __slots__ = ("_sets",)

    def __init__(self) -> None:
        self._sets: dict[bytes, int] = {}

    def __len__(self) -> int:
        """Number of digests that any worker has."""
        return len(self._sets)

    def get(self, digest: bytes) -> int:
        """Return the workers that have an item."""
        return self._sets.get(digest, 0)

    def add(self, digest: bytes, bit: int) -> None:
        """Add a worker to the holders of an item. Items of one worker alone share its bit: it costs no memory."""
        others = self._sets.get(digest)
        self._sets[digest] = bit if others is None else others | bit

    def update(self, digests: Iterable[bytes], bit: int) -> None:
        """Add a worker to the holders of many items, in a third of the time of adding them one by one."""
        sets = self._sets
        for digest in digests:
            others = sets.get(digest)
            sets[digest] = bit if others is None else others | bit

    def discard(self, digest: bytes, bit: int) -> None:
        """Remove a worker from the holders of an item."""
        if others := self._sets.get(digest, 0) & ~bit:
            self._sets[digest] = others
        else:
            self._sets.pop(digest, None)


class Directory:
    """The workers of a frontend by their numbers, and which items they have."""

    def __init__(self) -> None:
        self.announced = Holders()
        self.sent = Holders()
        """Sent by a request that is not settled."""

        self.pending = Holders()
        """Items of requests that are being prepared for a worker."""

        self._members = 0
        self._free: list[int] = []

    def enter(self) -> int:
        """Return the number of a worker that comes: the lowest that is free, so that sets stay short."""
        if self._free:
            return heappop(self._free)
        self._members += 1
        return self._members - 1

    def leave(self, number: int) -> None:
        """Free the number of a worker that leaves and has no items any more."""
        heappush(self._free, number)

    def holders(self, digests: Iterable[Digest]) -> list[int]:
        """Return the workers that have an item, for each of the digests that any worker has."""
        announced, sent, pending = self.announced._sets, self.sent._sets, self.pending._sets
        if not sent and not pending:
            return [workers for digest in digests if (workers := announced.get(digest))]
        return [
            workers
            for digest in digests
            if (workers := announced.get(digest, 0) | sent.get(digest, 0) | pending.get(digest, 0))
        ]
