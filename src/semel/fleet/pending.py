"""Requests that are being prepared for a worker: it has been chosen for them, and nothing is sent yet.

Preprocessing takes longer than choosing. The next request must know where the last ones are about to go, or equal new
items of one moment are sent to several workers, and a burst to the one that seemed idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from semel.core import Digest
from semel.ledger import Holders

__all__ = ["PendingRequests"]


class PendingRequests:
    """What one worker is about to get; `holders` know of it as `bit`."""

    def __init__(self, holders: Holders, bit: int) -> None:
        self.requests = 0
        self._items: Counter[Digest] = Counter()
        self._holders = holders
        self._bit = bit

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._items

    @contextmanager
    def request(self, digests: Collection[Digest]) -> Iterator[None]:
        """A request with these items, until it is sent or given up."""
        self.requests += 1
        self._items.update(digests)
        for digest in digests:
            self._holders.add(digest, self._bit)
        try:
            yield
        finally:
            self.requests -= 1
            self._items.subtract(digests)
            for digest in digests:
                if not self._items[digest]:
                    del self._items[digest]
                    self._holders.discard(digest, self._bit)
