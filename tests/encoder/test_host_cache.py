"""What a host cache evicts; `test_prefetched` drives all else of it, and its mutants."""

from __future__ import annotations

from semel.encoder.eviction import OldestReleased
from semel.encoder.host_cache import HostCache, Slot


def filled(host_cache: HostCache, key: str, blocks: int) -> Slot:
    slot = host_cache.reserve(key, blocks, blocks)
    assert slot is not None
    host_cache.fill(slot, form=(blocks, 8))
    return slot


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
