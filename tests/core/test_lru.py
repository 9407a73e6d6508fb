"""The bounded map under all others, held against a list that is searched from end to end."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core import LruMap

MAX_WEIGHT = 12
BOUNDS = st.tuples(st.integers(0, MAX_WEIGHT), st.sampled_from([0, 1, 3, sys.maxsize]))
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "get", "peek", "pop", "clear"]), st.integers(0, 5), st.integers(0, 14)
    ),
    max_size=60,
)
Bounds = tuple[int, int]
Steps = list[tuple[str, int, int]]


@dataclass
class Slow:
    """What the map should be: keys and weights, the least recently used first. A value is its own weight."""

    max_weight: int
    max_entries: int
    rows: list[tuple[int, int]] = field(default_factory=list)

    def find(self, key: int) -> int | None:
        return next((weight for its, weight in self.rows if its == key), None)

    def pop(self, key: int) -> int | None:
        found = self.find(key)
        self.rows = [row for row in self.rows if row[0] != key]
        return found

    def get(self, key: int) -> int | None:
        found = self.pop(key)
        if found is not None:
            self.rows.append((key, found))
        return found

    def put(self, key: int, weight: int) -> list[int]:
        self.pop(key)
        if not self.fits([(key, weight)]):
            return []
        evicted = []
        while not self.fits([*self.rows, (key, weight)]):
            evicted.append(self.rows.pop(0)[0])
        self.rows.append((key, weight))
        return evicted

    def fits(self, rows: list[tuple[int, int]]) -> bool:
        return sum(weight for _, weight in rows) <= self.max_weight and len(rows) <= self.max_entries


def take(step: str, key: int, weight: int, lru: LruMap[int, int], slow: Slow) -> None:
    if step == "put":
        assert lru.put(key, weight) == slow.put(key, weight)
    elif step == "get":
        assert lru.get(key) == slow.get(key)
    elif step == "peek":
        assert lru.peek(key) == slow.find(key)
        assert (key in lru) == (slow.find(key) is not None)
    elif step == "pop":
        assert lru.pop(key) == slow.pop(key)
    elif weight == 14:
        lru.clear()
        slow.rows.clear()


def check(kind: type[LruMap[int, int]], bounds: Bounds, steps: Steps) -> None:
    max_weight, max_entries = bounds
    lru, slow = kind(max_weight, lambda value: value, max_entries=max_entries), Slow(max_weight, max_entries)
    for step, key, weight in steps:
        take(step, key, weight, lru, slow)
        assert list(lru.items()) == slow.rows
        assert list(lru) == [key for key, _ in slow.rows]
        assert len(lru) == len(slow.rows) <= max_entries
        assert lru.weight == sum(weight for _, weight in slow.rows) <= max_weight


@given(BOUNDS, STEPS)
def test_it_has_what_was_used_last_within_its_bounds_and_says_what_went(bounds: Bounds, steps: Steps) -> None:
    check(LruMap, bounds, steps)


class FirstIn(LruMap[int, int]):
    """What was put in first goes first, used or not."""

    get = LruMap.peek


class Forgetful(LruMap[int, int]):
    """Does not say that what was under a key weighs no more."""

    def pop(self, key: int) -> int | None:
        return self._values.pop(key, None)


class Wasteful(LruMap[int, int]):
    """Makes room for what will not fit."""

    def put(self, key: int, value: int) -> list[int]:
        if value > self.max_weight:
            self.clear()
        return super().put(key, value)


@pytest.mark.parametrize(
    ("mutant", "steps"),
    [
        (FirstIn, [("put", 1, 5), ("put", 2, 5), ("get", 1, 0), ("put", 3, 5)]),
        (Forgetful, [("put", 1, 5), ("put", 1, 5)]),
        (Wasteful, [("put", 1, 5), ("put", 2, 14)]),
    ],
)
def test_a_mutant_of_it_fails(mutant: type[LruMap[int, int]], steps: Steps) -> None:
    check(LruMap, (MAX_WEIGHT, 3), steps)
    with pytest.raises(AssertionError):
        check(mutant, (MAX_WEIGHT, 3), steps)


def test_without_weights_it_is_bounded_in_entries() -> None:
    lru = LruMap[str, str](2)
    evicted = [lru.put(key, key) for key in "abc"]
    assert evicted == [[], [], ["a"]]
    assert repr(lru) == "LruMap(2 entries, 2 of 2)"


def test_a_value_is_weighed_when_it_comes_and_when_it_goes_and_never_else() -> None:
    weighed: list[str] = []

    def weigh(value: str) -> int:
        weighed.append(value)
        return 1

    lru = LruMap[int, str](100, weigh)
    for key in range(100):
        lru.put(key, "first")
    weighed.clear()
    lru.get(5)
    lru.peek(5)
    assert weighed == []
    lru.put(100, "second")
    assert sorted(weighed) == ["first", "second"], "no scan of what is there"
