"""A shelf in small steps: what is found, what is evicted, and when blocks are free again."""

from __future__ import annotations

from semel.encoder import OldestReleased, Shelf, Slot


def filled(shelf: Shelf, key: str, blocks: int) -> Slot:
    slot = shelf.reserve(key, blocks, blocks)
    assert slot is not None
    shelf.fill(slot, form=(blocks, 8))
    return slot


def test_an_output_is_found_when_it_is_whole_and_not_before() -> None:
    shelf = Shelf(8)
    slot = shelf.reserve("a", 3, 3)
    assert slot is not None
    assert shelf.filled("a") is None
    assert (shelf.free, shelf.reserved) == (5, 3)
    assert shelf.reserve("a", 3, 3) is None, "one copy of it is enough"
    shelf.fill(slot, form=(3, 8))
    assert shelf.filled("a") is slot
    assert (shelf.free, shelf.reserved, slot.form) == (5, 0, (3, 8))


def test_what_nobody_reads_makes_room_and_what_somebody_reads_does_not() -> None:
    shelf = Shelf(8, OldestReleased())
    first, second = filled(shelf, "a", 4), filled(shelf, "b", 4)
    shelf.pin(first)
    assert shelf.reserve("c", 5, 5) is None
    assert shelf.counts.full == 1
    assert shelf.reserve("c", 4, 4) is not None
    assert (shelf.filled("a"), shelf.filled("b")) == (first, None)
    assert second.extents
    assert (shelf.counts.evictions, shelf.pinned, shelf.free) == (1, 4, 0)
    shelf.unpin(first)
    assert shelf.reserve("d", 4, 4) is not None
    assert shelf.filled("a") is None


def test_what_is_shown_often_stays() -> None:
    """`CostAware`, the default. The control is the order of release."""
    for eviction, stays in ((None, "often"), (OldestReleased(), "last")):
        shelf = Shelf(8, eviction)
        often = filled(shelf, "often", 4)
        for _ in range(3):
            shelf.pin(often)
            shelf.unpin(often)
        filled(shelf, "last", 4)
        filled(shelf, "new", 4)
        assert [key for key in ("often", "last") if shelf.filled(key)] == [stays]


def test_a_reservation_for_nothing_is_free_again() -> None:
    shelf = Shelf(8)
    slot = shelf.reserve("a", 8, 8)
    assert slot is not None
    shelf.cancel(slot)
    assert (shelf.free, shelf.reserved) == (8, 0)
    assert shelf.reserve("a", 8, 8) is not None


def test_forgotten_outputs_are_not_found_and_keep_their_blocks_while_copies_use_them() -> None:
    shelf = Shelf(12)
    idle, read, written = filled(shelf, "idle", 4), filled(shelf, "read", 4), shelf.reserve("written", 4, 4)
    assert idle.is_filled
    assert written is not None
    shelf.pin(read)
    shelf.forget_all()
    assert all(shelf.filled(key) is None for key in ("idle", "read", "written"))
    assert shelf.free == 4
    again = shelf.reserve("written", 4, 4)
    assert again is not None
    shelf.unpin(read)
    shelf.fill(written)
    assert shelf.filled("written") is None, "what was on its way is of before"
    assert (shelf.free, shelf.reserved, shelf.pinned) == (8, 4, 0)
    shelf.fill(again)
    assert shelf.filled("written") is again
