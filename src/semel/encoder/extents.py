"""Free blocks of a region, as extents: so that what is stored together lies together where that is possible.

One extent is one copy. A request for blocks gets the smallest extent that fits; if none does, the largest ones, until
there are enough. What is given back joins its neighbours. Nothing is ever lost to fragmentation, only copies are.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

__all__ = ["Extent", "FreeExtents"]

Extent = tuple[int, int]
"""`(first, count)`: consecutive blocks."""


class FreeExtents:
    """The free blocks among `blocks` ones."""

    def __init__(self, blocks: int) -> None:
        self.free = blocks
        self._extents: list[Extent] = [(0, blocks)] if blocks else []  # in order, never adjacent

    def take(self, blocks: int) -> tuple[Extent, ...]:
        """Take blocks, of which so many must be free."""
        if blocks > self.free:
            raise ValueError(f"{blocks} blocks were asked for, {self.free} are free")
        found: list[Extent] = []
        while blocks:
            place = self._place_for(blocks)
            first, count = self._extents[place]
            used = min(blocks, count)
            self._extents[place : place + 1] = [(first + used, count - used)] if used < count else []
            found.append((first, used))
            self.free -= used
            blocks -= used
        return tuple(found)

    def give_back(self, extents: Iterable[Extent]) -> None:
        """Make blocks free that were taken."""
        for first, count in extents:
            place = bisect_left(self._extents, (first, 0))
            self.free += count
            if place < len(self._extents) and self._extents[place][0] == first + count:
                count += self._extents.pop(place)[1]
            if place and sum(self._extents[place - 1]) == first:
                before, size = self._extents.pop(place - 1)
                first, count = before, size + count
            insort(self._extents, (first, count))

    def _place_for(self, blocks: int) -> int:
        fitting = [(count, place) for place, (_, count) in enumerate(self._extents) if count >= blocks]
        if fitting:
            return min(fitting)[1]
        return max(range(len(self._extents)), key=lambda place: self._extents[place][1])
