"""Requests that are being prepared for a worker: it has been chosen for them, and nothing is sent yet.

Preprocessing takes longer than choosing. The next request must know where the last ones are about to go, or equal new
items of one moment are sent to several workers, and a burst to the one that seemed idle.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from semel.core import Digest
from semel.ledger import Holders

__all__ = ["PendingRequests"]


class PendingRequests:
    """The requests that one worker is about to get; `holders` know of it as `bit`."""

    __slots__ = ("_bit", "_holders", "_items", "requests")

    def __init__(self, holders: Holders, bit: int) -> None:
        self.requests = 0
        self._items: dict[Digest, int] = {}
        self._holders = holders
        self._bit = bit

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._items

    @contextmanager
    def request(self, digests: Collection[Digest]) -> Iterator[None]:
        """Count a request with these items, until it is sent or given up."""
        self.begin(digests)
        try:
            yield
        finally:
            self.end(digests)

    def begin(self, digests: Collection[Digest]) -> None:
        """Count a request with these items, until `end`."""
        self.requests += 1
        for digest in digests:
            self._items[digest] = self._items.get(digest, 0) + 1
            self._holders.add(digest, self._bit)

    def end(self, digests: Collection[Digest]) -> None:
        """Discount a request that is sent or given up."""
        self.requests -= 1
        for digest in digests:
            if others := self._items[digest] - 1:
                self._items[digest] = others
            else:
                del self._items[digest]
                self._holders.discard(digest, self._bit)

    def leave(self) -> None:
        """Free the bit of a worker that is removed, whatever is still being prepared for it."""
        for digest in self._items:
            self._holders.discard(digest, self._bit)
        self._holders = Holders()
