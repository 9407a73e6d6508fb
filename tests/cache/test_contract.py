"""Every kind of cache, held to the one contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import thread_time
from timeit import timeit
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from semel.cache import SMALLEST_BYTES, Cache, LruCache, NoCache, SharedCache, tensor_offsets
from semel.core import Digest, Feature, Layout, Tensor
from semel.fairness.tenant_lru import IDLE_S
from tests.cache.examples import assert_equal, described, digest_of, feature_of
from tests.effort import examples
from tests.fairness.model import Model, Piece

Sizes = tuple[int, ...]
CAPACITY = 1_024


def charge_shared(sizes: Sizes) -> int:
    return max(-(-tensor_offsets(sizes)[1] // 64) * 64, SMALLEST_BYTES)


def charge_plain(sizes: Sizes) -> int:
    return max(sum(sizes), SMALLEST_BYTES)


class Clock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class PlainLru(LruCache):
    """The wrong implementation: one order for all tenants."""

    def put(self, digest: Digest, feature: Feature, *, tenant: str = "") -> Feature:
        del tenant
        return super().put(digest, feature)


Make = Callable[[int, Clock], Cache]
KINDS: dict[str, tuple[Make, Callable[[Sizes], int]]] = {
    "lru": (LruCache, charge_plain),
    "shared": (SharedCache.create, charge_shared),
    "none": (lambda *_: NoCache(), charge_plain),
}
HOLDING = ("lru", "shared")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=KINDS)
def cache(request: pytest.FixtureRequest, clock: Clock) -> Cache:
    make, _ = KINDS[request.param]
    return make(CAPACITY, clock)


@pytest.fixture(params=HOLDING)
def holding(request: pytest.FixtureRequest, clock: Clock) -> Cache:
    make, _ = KINDS[request.param]
    return make(CAPACITY, clock)


def test_what_put_returns_is_the_feature_that_was_given_D4(cache: Cache) -> None:
    assert_equal(cache.put(digest_of(1), feature_of(1, 100, 0, 7)), 1, (100, 0, 7))


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


def put_all(cache: Cache, tenant: str, numbers: range, nbytes: int = 64) -> int:
    """Put features of a tenant; returns how many of them are cached in the end."""
    for number in numbers:
        cache.put(digest_of(number), feature_of(number, nbytes), tenant=tenant)
    return sum(digest_of(number) in cache for number in numbers)


def check_that_a_flood_evicts_nothing_within_a_share(cache: Cache) -> None:
    """B has its half, then A puts a hundred times what fits, in features of many sizes."""
    assert put_all(cache, "B", range(8)) == 8
    for number in range(100, 1_700):
        cache.put(digest_of(number), feature_of(number, 64 * (1 + number % 5)), tenant="A")
        assert cache.nbytes <= CAPACITY
    assert all(digest_of(number) in cache for number in range(8))
    assert (cache.nbytes_of("B"), cache.nbytes_of("A") > CAPACITY // 4) == (512, True)


def test_a_tenant_that_floods_evicts_nothing_of_another_within_its_share_S21(holding: Cache) -> None:
    check_that_a_flood_evicts_nothing_within_a_share(holding)


def test_mutant_one_order_for_all_tenants_evicts_it() -> None:
    with pytest.raises(AssertionError):
        check_that_a_flood_evicts_nothing_within_a_share(PlainLru(CAPACITY))


def test_nothing_is_kept_of_tenants_whose_features_are_gone(holding: Cache) -> None:
    for number in range(100):
        holding.put(digest_of(number), feature_of(number, 300), tenant=f"tenant {number}")
    holding.clear()
    assert holding.nbytes_of("tenant 1") == 0
    assert put_all(holding, "A", range(16)) == 16
    assert isinstance(holding, LruCache | SharedCache)
    assert list(holding._room._lines) == ["A"]


def seconds_per_eviction(make: Make, entries: int) -> float:
    """What it takes to put a feature that evicts another, of two tenants by turns."""
    cache, numbers = make(64 * entries, Clock()), iter(range(10**9))
    feature = feature_of(1, 64)

    def put() -> None:
        number = next(numbers)
        cache.put(digest_of(number), feature, tenant="AB"[number % 2])

    for _ in range(entries):
        put()
    return min(timeit(put, timer=thread_time, number=100) for _ in range(9))


@pytest.mark.parametrize("kind", HOLDING)
def test_an_eviction_takes_as_long_among_five_thousand_features_as_among_a_hundred_D4(kind: str) -> None:
    make, _ = KINDS[kind]
    assert seconds_per_eviction(make, 5_000) < 10 * seconds_per_eviction(make, 100)


NUMBERS = st.integers(0, 11)
SIZES = st.lists(st.integers(0, 700), max_size=3).map(tuple)
TENANTS = "ABC"


@dataclass(eq=False)
class Cached(Piece):
    """A feature, as the model sees it."""

    number: int = 0
    sizes: Sizes = ()


class CacheMachine(RuleBasedStateMachine):
    """Any order of calls; what has to go is the model of all that tenants share."""

    kind: str
    tenants: str
    """The tenants; a feature is always of the same one."""

    @initialize(capacity=st.sampled_from([1, 64, 500, CAPACITY]))
    def start(self, capacity: int) -> None:
        make, self.charge = KINDS[self.kind]
        self.clock = Clock()
        self.cache = make(capacity, self.clock)
        self.model = Model(capacity // 64 * 64 if self.kind == "shared" else self.cache.capacity, IDLE_S)
        self.evictions = 0

    def find(self, number: int) -> Cached | None:
        cached = [piece for piece in self.model.pieces if isinstance(piece, Cached)]
        return next((piece for piece in cached if piece.number == number), None)

    @rule(number=NUMBERS, sizes=SIZES)
    def put(self, number: int, sizes: Sizes) -> None:
        tenant, piece = self.tenants[number % len(self.tenants)], self.find(number)
        sizes = sizes if piece is None else piece.sizes
        assert_equal(self.cache.put(digest_of(number), feature_of(number, *sizes), tenant=tenant), number, sizes)
        nbytes = self.charge(sizes)
        if piece is not None:
            self.model.use(piece)
        elif self.model.fits(nbytes) or self.model.can_have(tenant, nbytes):
            self.make_room(tenant, nbytes)
            if digest_of(number) in self.cache or not self.may_lack_a_piece():
                self.model.put(Cached(tenant, nbytes, number=number, sizes=sizes))

    def may_lack_a_piece(self) -> bool:
        """Over shared memory, the room may be in pieces, between which are features that another is entitled to."""
        return self.kind == "shared" and len(self.tenants) > 1

    def make_room(self, tenant: str, nbytes: int) -> None:
        """As few go as it takes; over shared memory, as many as it takes to have the room in one piece."""
        while not self.model.fits(nbytes):
            assert self.evict_next(tenant, nbytes)
        while self.kind == "shared" and self.evict_next(tenant, nbytes):
            pass

    def evict_next(self, tenant: str, nbytes: int) -> bool:
        """Evict the oldest feature of whoever has to yield, if the cache did; if several have, whichever it took."""
        for piece in self.model.victims(tenant, nbytes):
            if isinstance(piece, Cached) and digest_of(piece.number) not in self.cache:
                self.model.drop(piece)
                self.evictions += 1
                return True
        return False

    @rule(number=NUMBERS)
    def get(self, number: int) -> None:
        feature, piece = self.cache.get(digest_of(number)), self.find(number)
        if piece is None:
            assert feature is None
            return
        assert_equal(feature, number, piece.sizes)
        self.model.use(piece)

    @rule(number=NUMBERS)
    def discard(self, number: int) -> None:
        self.cache.discard(digest_of(number))
        if (piece := self.find(number)) is not None:
            self.model.drop(piece)

    @rule(share=st.sampled_from([0.3, 0.7, 1.1]))
    def wait(self, share: float) -> None:
        self.clock.now_s += share * IDLE_S
        self.model.now_s = self.clock.now_s

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.model.pieces.clear()

    @invariant()
    def agree(self) -> None:
        have = {number for number in range(12) if digest_of(number) in self.cache}
        assert have == {number for number in range(12) if self.find(number)}
        assert len(self.cache) == len(self.model.pieces)
        amounts = self.model.amounts()
        assert {tenant: n for tenant in self.tenants if (n := self.cache.nbytes_of(tenant))} == amounts
        assert self.cache.nbytes == amounts.total() <= self.cache.capacity
        assert self.cache.evictions == self.evictions

    def teardown(self) -> None:
        self.cache.close()


def run_machine(kind: str, tenants: str) -> None:
    machine = type(f"{kind.title()}Machine", (CacheMachine,), {"kind": kind, "tenants": tenants})
    checks = settings(
        max_examples=examples(60), stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    run_state_machine_as_test(machine, settings=checks)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_does_what_a_list_of_what_was_used_does_D4(kind: str) -> None:
    run_machine(kind, "A")


@pytest.mark.parametrize("kind", KINDS)
def test_so_it_does_with_tenants_who_have_shares_S21(kind: str) -> None:
    run_machine(kind, TENANTS)
