"""What workers hold, as all frontends know it: one store instead of a directory for each of them.

Every worker numbers its changes. What it has told everybody is in `announced`, as in each frontend's directory. A
frontend that was told more, because a change came with an answer to it, is at a higher number of that worker: it reads
the changes up to there on top.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from semel.core import Digest
from semel.ledger import Holders

__all__ = ["CacheUpdates"]


class CacheUpdates:
    """The changes of all workers, and how far everybody knows of them."""

    def __init__(self, workers: int) -> None:
        self.announced = Holders()
        self._number = [0] * workers
        self._recent: list[dict[Digest, list[tuple[int, bool]]]] = [{} for _ in range(workers)]
        """By digest, the changes that not everybody was told of: their numbers, and whether it is held since."""

    def number(self, worker: int) -> int:
        """The number of a worker's last change."""
        return self._number[worker]

    def hold(self, worker: int, digest: Digest) -> None:
        """A worker holds an item from now on."""
        self._change(worker, digest, True)

    def drop(self, worker: int, digest: Digest) -> None:
        """A worker no longer holds an item."""
        self._change(worker, digest, False)

    def _change(self, worker: int, digest: Digest, is_present: bool) -> None:
        self._number[worker] += 1
        self._recent[worker].setdefault(digest, []).append((self._number[worker], is_present))

    def tell(self, worker: int) -> tuple[int, int]:
        """Everybody is told of a worker's changes. Returns how many items it has now, and how many no more."""
        recent, bit = self._recent[worker], 1 << worker
        have = gone = 0
        for digest, changes in recent.items():
            was_present = bool(self.announced.get(digest) & bit)
            if changes[-1][1] and not was_present:
                self.announced.add(digest, bit)
                have += 1
            elif was_present and not changes[-1][1]:
                self.announced.discard(digest, bit)
                gone += 1
        recent.clear()
        return have, gone

    def holders(self, digest: Digest, ahead: Mapping[int, int]) -> int:
        """The workers that hold an item, for a frontend that was told of some of them up to these numbers."""
        workers = self.announced.get(digest)
        for worker, number in ahead.items():
            if changes := self._recent[worker].get(digest):
                bit = 1 << worker
                for changed, is_present in changes:
                    if changed <= number:
                        workers = workers | bit if is_present else workers & ~bit
        return workers

    def holds(self, worker: int, digest: Digest, number: int) -> bool:
        """Whether a worker holds an item, for a frontend that was told of it up to this number."""
        found = bool(self.announced.get(digest) >> worker & 1)
        for changed, is_present in self._recent[worker].get(digest, ()):
            if changed <= number:
                found = is_present
        return found

    def clear(self, worker: int, digests: Iterable[Digest]) -> None:
        """A worker is gone, with all that it held: everybody sees that its session has ended."""
        for digest in digests:
            self.announced.discard(digest, 1 << worker)
        for digest in self._recent[worker]:
            self.announced.discard(digest, 1 << worker)
        self._recent[worker].clear()
