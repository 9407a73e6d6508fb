"""Free blocks: every block is free or taken, once, and what is given back joins its neighbours."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.encoder.extents import Extent, FreeExtents


def blocks_of(extents: tuple[Extent, ...]) -> list[int]:
    return [block for first, count in extents for block in range(first, first + count)]


@given(st.integers(0, 40), st.lists(st.tuples(st.booleans(), st.integers(1, 12))))
def test_blocks_are_taken_once_and_whatever_is_free_can_be_had(capacity: int, calls: list[tuple[bool, int]]) -> None:
    free = FreeExtents(capacity)
    taken: list[tuple[Extent, ...]] = []
    for takes, number in calls:
        if takes and number <= free.free:
            taken.append(free.take(number))
            assert len(blocks_of(taken[-1])) == number
        elif not takes and taken:
            free.give_back(taken.pop(number % len(taken)))
        used = [block for extents in taken for block in blocks_of(extents)]
        assert len(used) == len(set(used)) == capacity - free.free
        assert all(0 <= block < capacity for block in used)
    for extents in taken:
        free.give_back(extents)
    assert free.take(capacity) == (((0, capacity),) if capacity else ()), "all of it lies together again"


def test_the_smallest_extent_that_fits_is_taken_and_several_if_none_does() -> None:
    free = FreeExtents(12)
    parts = [free.take(count) for count in (3, 1, 2, 1, 5)]
    for part in (parts[0], parts[2], parts[4]):  # 0-2, 4-5, 7-11
        free.give_back(part)
    assert free.take(2) == ((4, 2),)
    assert free.take(6) == ((7, 5), (0, 1))
    with pytest.raises(ValueError, match="3 blocks were asked for, 2 are free"):
        free.take(3)
