"""The cache of layouts: its bounds, and what stays (the order of eviction is `LruMap`'s: `core/test_lru`)."""

from __future__ import annotations

from semel.cache import LayoutCache
from semel.core import Layout


def test_it_is_bounded_in_layouts_and_in_tokens_and_the_first_layout_under_a_key_stays() -> None:
    cache = LayoutCache[int](max_entries=3, max_tokens=10)
    cache.put(1, Layout((7,) * 4))
    cache.put(1, Layout((8,) * 5))
    cache.put(2, Layout((9,) * 11))
    assert (cache.get(1), cache.get(2), len(cache), cache.weight) == (Layout((7,) * 4), None, 1, 4)
    for number in (3, 4, 5):
        cache.put(number, Layout((number,) * 2))
    assert [number in cache for number in (1, 3, 4, 5)] == [False, True, True, True]
    cache.put(6, Layout((6,) * 8))
    assert (len(cache), cache.weight) == (2, 10)
    cache.clear()
    assert (len(cache), cache.weight) == (0, 0)
