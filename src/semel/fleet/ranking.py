"""Rendezvous hashing: the workers that a key ranks highest, by a hash of both. The last keys' highest few are kept.

Ranking a thousand workers takes a thousand hashes, over a millisecond. A key comes again: the turns of a conversation,
an item that is not held yet. What was kept is forgotten when a worker comes or goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import nlargest
from typing import Final

from semel.core import LruMap
from semel.core.rendezvous import scores

__all__ = ["Ranking", "numbers_in"]

_KEPT: Final = 16  # of the workers that a key ranks highest: if too few of these may be chosen, all are ranked again
_MAX_KEYS: Final = 8_192
_FEW: Final = 8


def numbers_in(workers: int) -> Iterator[int]:
    """Yield the numbers in a set of workers, lowest first."""
    while workers:
        lowest = workers & -workers
        yield lowest.bit_length() - 1
        workers ^= lowest


class Ranking:
    """Workers by number, and how high keys rank them."""

    def __init__(self, *, max_keys: int = _MAX_KEYS) -> None:
        self._names: dict[int, bytes] = {}
        self._highest: LruMap[bytes, tuple[int, ...]] = LruMap(max_keys)

    def put(self, number: int, name: str) -> None:
        """Add a worker."""
        self._names[number] = name.encode()
        self._highest.clear()

    def remove(self, number: int) -> None:
        """Remove a worker."""
        del self._names[number]
        self._highest.clear()

    def top(self, key: bytes, workers: int, count: int) -> list[int]:
        """Return `count` of a set of workers, or all if there are fewer: those that a key ranks highest, in order."""
        if workers.bit_count() > max(_FEW, count):
            found = [number for number in self._of(key) if workers >> number & 1][:count]
            if len(found) == count:
                return found
        return self._ranked(key, numbers_in(workers), count)

    def _of(self, key: bytes) -> tuple[int, ...]:
        if (kept := self._highest.get(key)) is None:
            kept = tuple(self._ranked(key, self._names, _KEPT))
            self._highest.put(key, kept)
        return kept

    def _ranked(self, key: bytes, numbers: Iterable[int], count: int) -> list[int]:
        """Rank as `core.rendezvous.rank`: the order of UTF-8 is that of the text."""
        listed = list(numbers)
        names = [self._names[number] for number in listed]
        return [number for _, _, number in nlargest(count, zip(scores(names, key), names, listed, strict=True))]
