"""The cache of layouts, held against a list that is searched from end to end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from semel.cache import LayoutCache
from semel.core import Digest, Layout, Mask

MAX_ENTRIES = 4
MAX_TOKENS = 12


def layout_of(number: int) -> Layout:
    bits = [bool((number + index) % 3) for index in range(number)]
    return Layout(tuple(range(number, 2 * number)), Mask(bits) if number % 2 else None)


def digest_of(number: int) -> Digest:
    return Digest(number.to_bytes(32, "big"))


class Slow:
    """What the cache should hold: a list, oldest first."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def touch(self, number: int) -> bool:
        if number not in self.held:
            return False
        self.held.remove(number)
        self.held.append(number)
        return True

    def put(self, number: int) -> None:
        if self.touch(number) or number > MAX_TOKENS:
            return
        self.held.append(number)
        while len(self.held) > MAX_ENTRIES or sum(self.held) > MAX_TOKENS:
            self.held.pop(0)


steps = st.lists(st.tuples(st.sampled_from(["get", "put", "put", "look", "clear"]), st.integers(1, 14)), max_size=60)


@given(steps)
def test_it_holds_what_was_used_last_within_both_bounds(taken: list[tuple[str, int]]) -> None:
    cache, slow = LayoutCache[Digest](MAX_ENTRIES, MAX_TOKENS), Slow()
    for step, number in taken:
        if step == "get":
            assert cache.get(digest_of(number)) == (layout_of(number) if slow.touch(number) else None)
        elif step == "put":
            cache.put(digest_of(number), layout_of(number))
            slow.put(number)
        elif step == "look":
            assert (digest_of(number) in cache) == (number in slow.held)
        elif number == 14:
            cache.clear()
            slow.held.clear()
        assert len(cache) == len(slow.held) <= MAX_ENTRIES
        assert cache.weight == sum(slow.held) <= MAX_TOKENS
        assert all(digest_of(held) in cache for held in slow.held)


def test_one_without_room_holds_nothing() -> None:
    cache = LayoutCache[Digest](max_entries=0)
    cache.put(digest_of(1), layout_of(1))
    assert cache.get(digest_of(1)) is None
    assert repr(cache) == "LruMap(0 entries, 0 of 16,777,216)"
