"""A host cache in small steps: what is found, what is evicted, and when blocks are free again."""

from __future__ import annotations

from semel.encoder import HostCache, OldestReleased, Slot


def filled(host_cache: HostCache, key: str, blocks: int) -> Slot:
    slot = host_cache.reserve(key, blocks, blocks)
    assert slot is not None
    host_cache.fill(slot, form=(blocks, 8))
    return slot


def test_an_output_is_found_when_it_is_whole_and_not_before() -> None:
    host_cache = HostCache(8)
    slot = host_cache.reserve("a", 3, 3)
    assert slot is not None
    assert host_cache.filled("a") is None
    assert (host_cache.free, host_cache.reserved) == (5, 3)
    assert host_cache.reserve("a", 3, 3) is None, "one copy of it is enough"
    host_cache.fill(slot, form=(3, 8))
    assert host_cache.filled("a") is slot
    assert (host_cache.free, host_cache.reserved, slot.form) == (5, 0, (3, 8))


def test_what_nobody_reads_makes_room_and_what_somebody_reads_does_not() -> None:
    host_cache = HostCache(8, OldestReleased())
    first, second = filled(host_cache, "a", 4), filled(host_cache, "b", 4)
    host_cache.pin(first)
    assert host_cache.reserve("c", 5, 5) is None
    assert host_cache.counts.full == 1
    assert host_cache.reserve("c", 4, 4) is not None
    assert (host_cache.filled("a"), host_cache.filled("b")) == (first, None)
    assert second.extents
    assert (host_cache.counts.evictions, host_cache.pinned, host_cache.free) == (1, 4, 0)
    host_cache.unpin(first)
    assert host_cache.reserve("d", 4, 4) is not None
    assert host_cache.filled("a") is None


def test_what_is_shown_often_stays() -> None:
    """`CostAware`, the default. The control is the order of release."""
    for eviction, stays in ((None, "often"), (OldestReleased(), "last")):
        host_cache = HostCache(8, eviction)
        often = filled(host_cache, "often", 4)
        for _ in range(3):
            host_cache.pin(often)
            host_cache.unpin(often)
        filled(host_cache, "last", 4)
        filled(host_cache, "new", 4)
        assert [key for key in ("often", "last") if host_cache.filled(key)] == [stays]


def test_a_reservation_for_nothing_is_free_again() -> None:
    host_cache = HostCache(8)
    slot = host_cache.reserve("a", 8, 8)
    assert slot is not None
    host_cache.cancel(slot)
    assert (host_cache.free, host_cache.reserved) == (8, 0)
    assert host_cache.reserve("a", 8, 8) is not None


def test_forgotten_outputs_are_not_found_and_keep_their_blocks_while_copies_use_them() -> None:
    host_cache = HostCache(12)
    idle, read, written = (
        filled(host_cache, "idle", 4),
        filled(host_cache, "read", 4),
        host_cache.reserve("written", 4, 4),
    )
    assert idle.is_filled
    assert written is not None
    host_cache.pin(read)
    host_cache.forget_all()
    assert all(host_cache.filled(key) is None for key in ("idle", "read", "written"))
    assert host_cache.free == 4
    again = host_cache.reserve("written", 4, 4)
    assert again is not None
    host_cache.unpin(read)
    host_cache.fill(written)
    assert host_cache.filled("written") is None, "what was on its way is of before"
    assert (host_cache.free, host_cache.reserved, host_cache.pinned) == (8, 4, 0)
    host_cache.fill(again)
    assert host_cache.filled("written") is again
