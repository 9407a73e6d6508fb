"""Free ranges of a fixed space: arithmetic only, nothing is mapped or written here.

Every range begins at a multiple of 64 bytes, and its length is a multiple of 64 bytes. Two free ranges are never
adjacent: freeing a range merges it with its neighbours. Allocation takes the smallest free range that is large enough,
and the lowest of those.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Final

__all__ = ["ALIGNMENT", "Arena", "align"]

ALIGNMENT: Final = 64
"""Ranges, and tensors within a range, begin at multiples of this."""


def align(nbytes: int) -> int:
    """Round up to the next multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Arena:
    """An allocator of ranges of a space."""

    def __init__(self, size: int) -> None:
        self.size = size // ALIGNMENT * ALIGNMENT
        """Size of the space in bytes."""
        self._allocated: dict[int, int] = {}
        self.used = 0
        """Bytes of the allocated ranges."""
        # The free ranges, indexed three times: by size and offset, by start, by end.
        self._sizes: list[tuple[int, int]] = []
        self._begins: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        if self.size:
            self._add(0, self.size)

    def allocate(self, nbytes: int) -> int | None:
        """Allocate a range of this size, at least 64 bytes. Returns its offset, or None if no free range is large
        enough."""
        nbytes = align(max(nbytes, 1))
        found = bisect_left(self._sizes, (nbytes, 0))
        if found == len(self._sizes):
            return None
        size, offset = self._sizes[found]
        self._remove(offset, size)
        if size > nbytes:
            self._add(offset + nbytes, size - nbytes)
        self._allocated[offset] = nbytes
        self.used += nbytes
        return offset

    def free(self, offset: int) -> None:
        """Free an allocated range."""
        size = self._allocated.pop(offset)
        self.used -= size
        if (after := self._begins.get(offset + size)) is not None:
            self._remove(offset + size, after)
            size += after
        if (before := self._ends.get(offset)) is not None:
            self._remove(before, offset - before)
            offset, size = before, size + offset - before
        self._add(offset, size)

    def largest_gap_between(self, offsets: Iterable[int]) -> int:
        """Return the size of the largest free range if only those at these offsets were allocated."""
        largest = end = 0
        for offset in sorted(offsets):
            largest = max(largest, offset - end)
            end = offset + self._allocated[offset]
        return max(largest, self.size - end)

    def _add(self, offset: int, size: int) -> None:
        insort(self._sizes, (size, offset))
        self._begins[offset] = size
        self._ends[offset + size] = offset

    def _remove(self, offset: int, size: int) -> None:
        del self._sizes[bisect_left(self._sizes, (size, offset))]
        del self._begins[offset]
        del self._ends[offset + size]
