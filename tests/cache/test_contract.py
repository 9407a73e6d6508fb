"""Every kind of cache, held to the one contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from semel.cache import SMALLEST_BYTES, Cache, LruCache, NoCache, SharedCache, tensor_offsets
from semel.core import Feature, Layout, Tensor
from tests.cache.examples import assert_equal, described, digest_of, feature_of
from tests.effort import examples

Sizes = tuple[int, ...]
CAPACITY = 1_024


def charge_shared(sizes: Sizes) -> int:
    return max(-(-tensor_offsets(sizes)[1] // 64) * 64, SMALLEST_BYTES)


def charge_plain(sizes: Sizes) -> int:
    return max(sum(sizes), SMALLEST_BYTES)


KINDS: dict[str, tuple[Callable[[int], Cache], Callable[[Sizes], int]]] = {
    "lru": (LruCache, charge_plain),
    "shared": (SharedCache.create, charge_shared),
    "none": (lambda _: NoCache(), charge_plain),
}
HOLDING = ("lru", "shared")


@pytest.fixture(params=KINDS)
def cache(request: pytest.FixtureRequest) -> Cache:
    make, _ = KINDS[request.param]
    return make(CAPACITY)


@pytest.fixture(params=HOLDING)
def holding(request: pytest.FixtureRequest) -> Cache:
    make, _ = KINDS[request.param]
    return make(CAPACITY)


def test_what_put_returns_is_the_feature_that_was_given_D4(cache: Cache) -> None:
    assert_equal(cache.put(digest_of(1), feature_of(1, 100, 0, 7)), 1, (100, 0, 7))


def test_what_was_put_is_got_D4(holding: Cache) -> None:
    stored = holding.put(digest_of(1), feature_of(1, 100, 0, 7))
    assert digest_of(1) in holding
    assert holding.get(digest_of(1)) is stored
    assert len(holding) == 1


def test_nothing_is_held_where_there_is_no_cache_D4() -> None:
    cache = NoCache()
    given = feature_of(1, 10)
    assert cache.put(digest_of(1), given) is given
    assert cache.get(digest_of(1)) is None
    assert (len(cache), cache.nbytes, cache.capacity, cache.evictions) == (0, 0, 0, 0)


def test_a_feature_larger_than_the_cache_is_used_as_it_is_and_evicts_nothing_D4(cache: Cache) -> None:
    cache.put(digest_of(1), feature_of(1, 100))
    held, given = len(cache), feature_of(2, CAPACITY + 1)
    assert cache.put(digest_of(2), given) is given
    assert digest_of(2) not in cache
    assert len(cache) == held
    assert cache.evictions == 0


def test_the_first_under_a_digest_stays_D4(holding: Cache) -> None:
    first = holding.put(digest_of(1), feature_of(1, 100))
    assert holding.put(digest_of(1), feature_of(2, 50)) is first
    assert len(holding) == 1


def test_looking_whether_it_is_there_changes_no_order_and_getting_does_D4(holding: Cache) -> None:
    for number in range(2):
        holding.put(digest_of(number), feature_of(number, 512))
    assert digest_of(0) in holding
    holding.put(digest_of(2), feature_of(2, 512))
    assert digest_of(0) not in holding
    holding.get(digest_of(1))
    holding.put(digest_of(3), feature_of(3, 512))
    assert digest_of(1) in holding
    assert digest_of(2) not in holding
    assert holding.evictions == 2


def test_dtypes_and_shapes_survive_also_of_views_over_larger_elements_D4(cache: Cache) -> None:
    floats: Any = memoryview(bytearray(48)).cast("f", (3, 4))
    tensors = {"a": Tensor("float32", (3, 4), floats), "b": Tensor("int64", (), memoryview(bytes(range(8))))}
    given = Feature("audio", tensors, Layout((1,)))
    assert described(cache.put(digest_of(1), given)) == described(given)


def test_features_that_are_out_survive_eviction_clear_and_close_D5(cache: Cache) -> None:
    out = [cache.put(digest_of(number), feature_of(number, 300, 20)) for number in range(20)]
    cache.clear()
    assert (len(cache), cache.nbytes) == (0, 0)
    cache.put(digest_of(50), feature_of(50, 300))
    cache.close()
    cache.close()
    given = feature_of(60, 300)
    assert cache.put(digest_of(60), given) is given
    assert cache.get(digest_of(50)) is None
    for number, feature in enumerate(out):
        assert_equal(feature, number, (300, 20))


NUMBERS = st.integers(0, 11)
SIZES = st.lists(st.integers(0, 700), max_size=3).map(tuple)


class CacheMachine(RuleBasedStateMachine):
    """Any order of calls, with a list of what was used, oldest first, beside the cache."""

    kind: str

    @initialize(capacity=st.sampled_from([1, 64, 500, CAPACITY]))
    def start(self, capacity: int) -> None:
        make, self.charge = KINDS[self.kind]
        self.cache = make(capacity)
        self.used: list[int] = []
        self.sizes: dict[int, Sizes] = {}
        self.evictions = 0

    @rule(number=NUMBERS, sizes=SIZES)
    def put(self, number: int, sizes: Sizes) -> None:
        assert_equal(
            self.cache.put(digest_of(number), feature_of(number, *self.sizes.get(number, sizes))),
            number,
            (self.sizes.get(number, sizes)),
        )
        if number in self.used:
            self.touch(number)
        elif self.charge(sizes) <= self.cache.capacity:
            self.make_room(self.charge(sizes))
            self.used.append(number)
            self.sizes[number] = sizes

    def make_room(self, nbytes: int) -> None:
        """The oldest go, as few as it takes; over shared memory, as many as it takes to have the room in one piece."""
        while self.held_bytes() + nbytes > self.cache.capacity:
            self.evict_oldest()
        while self.used and self.kind == "shared" and digest_of(self.used[0]) not in self.cache:
            self.evict_oldest()

    def evict_oldest(self) -> None:
        del self.sizes[self.used.pop(0)]
        self.evictions += 1

    def held_bytes(self) -> int:
        return sum(self.charge(sizes) for sizes in self.sizes.values())

    def touch(self, number: int) -> None:
        self.used.remove(number)
        self.used.append(number)

    @rule(number=NUMBERS)
    def get(self, number: int) -> None:
        feature = self.cache.get(digest_of(number))
        if number not in self.used:
            assert feature is None
            return
        assert_equal(feature, number, self.sizes[number])
        self.touch(number)

    @rule(number=NUMBERS)
    def discard(self, number: int) -> None:
        self.cache.discard(digest_of(number))
        if number in self.used:
            self.used.remove(number)
            del self.sizes[number]

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.used.clear()
        self.sizes.clear()

    @invariant()
    def agree(self) -> None:
        assert {number for number in range(12) if digest_of(number) in self.cache} == set(self.used)
        assert len(self.cache) == len(self.used)
        assert self.cache.nbytes == self.held_bytes() <= self.cache.capacity
        assert self.cache.evictions == self.evictions

    def teardown(self) -> None:
        self.cache.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_does_what_a_list_of_what_was_used_does_D4(kind: str) -> None:
    machine = type(f"{kind.title()}Machine", (CacheMachine,), {"kind": kind})
    checks = settings(
        max_examples=examples(60), stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    run_state_machine_as_test(machine, settings=checks)
