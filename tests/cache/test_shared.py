"""The cache in shared memory: what keeps a range, what frees it, and what a stuck one costs."""

from __future__ import annotations

import gc
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from semel.cache import Lease, Reservation, SharedCache, Window, borrowed_feature, tensor_heads, tensor_offsets
from semel.core import Feature, Layout
from semel.errors import ConfigError, ProtocolError
from semel.processing import to_torch
from tests.cache.examples import assert_equal, digest_of, feature_of
from tests.effort import examples

ITEM = 640
SLOTS = 8


@pytest.fixture
def cache() -> SharedCache:
    return SharedCache.create(ITEM * SLOTS)


def fill(cache: SharedCache, numbers: range, *sizes: int) -> int:
    """Put features and count those that are stored, each of which is checked."""
    stored = 0
    for number in numbers:
        assert_equal(cache.put(digest_of(number), feature_of(number, *sizes)), number, sizes)
        stored += digest_of(number) in cache
    return stored


def test_the_tensors_of_a_feature_begin_at_multiples_of_64_bytes_D4(cache: SharedCache) -> None:
    assert tensor_offsets([1, 64, 0, 65]) == ((0, 64, 128, 128), 193)
    assert tensor_offsets([]) == ((), 0)
    cache.put(digest_of(1), feature_of(1, 1, 64, 0, 65))
    lease = cache.lease(digest_of(1))
    assert lease is not None
    assert (lease.offset % 64, lease.nbytes) == (0, 256)
    window = Window.attach(cache.segment.fileno())
    assert window.view(lease.offset + 128, 65) == feature_of(1, 1, 64, 0, 65).tensors["field3"].data


def test_stored_bytes_cannot_be_written_to_D4(cache: SharedCache) -> None:
    stored = cache.put(digest_of(1), feature_of(1, 10))
    assert stored.tensors["field0"].data.readonly


def test_a_range_is_used_again_only_when_the_last_buffer_over_it_is_gone_D4(cache: SharedCache) -> None:
    data: memoryview | None = cache.put(digest_of(0), feature_of(0, ITEM)).tensors["field0"].data[5:70].cast("B")
    assert fill(cache, range(1, 100), ITEM) == 99
    assert digest_of(0) not in cache
    assert (cache.nbytes, cache.occupied) == ((SLOTS - 1) * ITEM, SLOTS * ITEM)
    assert data == feature_of(0, ITEM).tensors["field0"].data[5:70]
    data = None
    assert cache.occupied == (SLOTS - 1) * ITEM
    fill(cache, range(100, 101), ITEM)
    assert cache.nbytes == SLOTS * ITEM


def test_memory_is_given_back_to_the_system_only_when_nothing_is_in_use_D4() -> None:
    cache = SharedCache.create(1 << 22)

    def resident() -> int:
        return os.fstat(cache.segment.fileno()).st_blocks * 512

    data: memoryview | None = cache.put(digest_of(0), feature_of(0, 1 << 20)).tensors["field0"].data
    cache.clear()
    assert not cache.give_back_memory()
    assert data == feature_of(0, 1 << 20).tensors["field0"].data
    data = None
    assert resident() >= 1 << 20
    assert cache.give_back_memory()
    assert resident() == 0
    assert fill(cache, range(1, 3), 1 << 20) == 2
    assert resident() >= 1 << 21


def test_arrays_and_tensors_over_a_feature_keep_its_range_D4(cache: SharedCache) -> None:
    pytest.importorskip("torch")
    array = np.frombuffer(cache.put(digest_of(0), feature_of(0, ITEM)).tensors["field0"].data, np.uint8)[3:9]
    tensor = to_torch(cache.put(digest_of(1), feature_of(1, ITEM)).tensors["field0"])[0, 3:9]
    fill(cache, range(10, 40), ITEM)
    assert cache.occupied - cache.nbytes == 2 * ITEM
    assert array.tobytes() == feature_of(0, ITEM).tensors["field0"].data[3:9]
    assert tensor.numpy().tobytes() == feature_of(1, ITEM).tensors["field0"].data[3:9]
    del array, tensor
    assert cache.occupied == cache.nbytes


def test_buffers_may_be_let_go_of_in_any_thread_D4(cache: SharedCache) -> None:
    started = threading.Barrier(5)

    def let_go(features: list[Feature]) -> None:
        started.wait(timeout=30)
        while features:
            features.pop()

    for turn in range(20):
        shares = [[cache.put(digest_of(n), feature_of(n, 64)) for n in range(turn, 10**6, 5 + t)[:9]] for t in range(4)]
        with ThreadPoolExecutor(4) as pool:
            done = [pool.submit(let_go, share) for share in shares]
            started.wait(timeout=30)
            fill(cache, range(2 * 10**6 + turn * 30, 2 * 10**6 + turn * 30 + 30), 64)
            for one in done:
                one.result(timeout=30)
    assert cache.occupied == cache.nbytes


@pytest.mark.parametrize("sizes", [(ITEM,), (ITEM // 2,), (ITEM * 3,)], ids=["equal", "smaller", "larger"])
def test_a_stuck_lease_costs_its_own_bytes_and_nothing_else_D4(cache: SharedCache, sizes: tuple[int]) -> None:
    cache.put(digest_of(0), feature_of(0, ITEM))
    assert cache.lease(digest_of(0)) is not None
    assert fill(cache, range(1, 501), *sizes) == 500
    assert digest_of(0) in cache
    assert_equal(cache.get(digest_of(0)), 0, (ITEM,))


def test_stuck_ranges_in_the_middle_leave_the_rest_to_features_of_all_sizes_D4() -> None:
    cache = SharedCache.create(ITEM * 64)
    fill(cache, range(64), ITEM)
    stuck = [cache.lease(digest_of(10)), cache.get(digest_of(30)), cache.lease(digest_of(50))]
    draw = random.Random(1)
    for number in range(100, 2_100):
        assert fill(cache, range(number, number + 1), draw.randrange(0, ITEM * 13), draw.randrange(100)) == 1
    assert all(stuck)
    assert len(cache) > 5


def test_what_cannot_fit_between_stuck_ranges_evicts_nothing_D4(cache: SharedCache) -> None:
    fill(cache, range(SLOTS), ITEM)
    assert cache.lease(digest_of(SLOTS // 2)) is not None
    given = feature_of(99, ITEM * SLOTS - 2 * ITEM)
    assert cache.put(digest_of(99), given) is given
    assert (len(cache), cache.evictions) == (SLOTS, 0)


def test_where_everything_is_in_use_a_feature_is_used_as_it_is_D4(cache: SharedCache) -> None:
    out = [cache.put(digest_of(number), feature_of(number, ITEM)) for number in range(SLOTS)]
    given = feature_of(50, ITEM)
    assert cache.put(digest_of(50), given) is given
    out.pop()
    assert fill(cache, range(51, 52), ITEM) == 1


def test_leases_have_ids_of_their_own_and_end_one_by_one_D4(cache: SharedCache) -> None:
    cache.put(digest_of(0), feature_of(0, ITEM))
    first, second = cache.lease(digest_of(0)), cache.lease(digest_of(0))
    assert first is not None
    assert second is not None
    assert (first.id != second.id, first.offset == second.offset, cache.leases) == (True, True, 2)
    cache.discard(digest_of(0))
    cache.give_back(first.id)
    cache.give_back(first.id)
    assert (cache.leases, cache.occupied) == (1, ITEM)
    cache.give_back(second.id)
    assert (cache.leases, cache.occupied) == (0, 0)
    assert cache.lease(digest_of(0)) is None


def test_a_reservation_that_is_dropped_is_free_again_D4(cache: SharedCache) -> None:
    reservation: Reservation | None = cache.reserve(ITEM * SLOTS)
    assert reservation is not None
    assert cache.reserve(1) is None
    reservation = None
    gc.collect()
    assert cache.occupied == 0
    released = cache.reserve(100)
    assert released is not None
    released.release()
    assert cache.occupied == 0
    with pytest.raises(ValueError, match="released"):
        released.view()


def adopt(cache: SharedCache, number: int, reservation: Reservation, feature: Feature) -> Feature | None:
    """Cache what was written to a reservation, as the pool does."""
    view = reservation.view()
    reservation.release()
    written = borrowed_feature(view, feature.modality, tensor_heads(feature), feature.layout)
    return cache.adopt(digest_of(number), written)


def test_what_another_process_wrote_is_held_without_a_copy_D4(cache: SharedCache) -> None:
    feature = feature_of(3, 100, 50)
    offsets, total = tensor_offsets([100, 50])
    reservation = cache.reserve(total)
    assert reservation is not None
    view = Window.attach(cache.segment.fileno(), writable=True).view(reservation.offset, total)
    for offset, tensor in zip(offsets, feature.tensors.values(), strict=True):
        view[offset : offset + tensor.nbytes] = tensor.data
    held = adopt(cache, 3, reservation, feature)
    assert held is not None
    assert_equal(held, 3, (100, 50))
    assert cache.get(digest_of(3)) is held


def test_the_first_feature_under_a_digest_stays_and_the_second_is_freed_D4(cache: SharedCache) -> None:
    first = cache.put(digest_of(1), feature_of(1, 100))
    reservation = cache.reserve(100)
    assert reservation is not None
    assert adopt(cache, 1, reservation, first) is first
    assert cache.occupied == cache.nbytes == 128


@pytest.mark.parametrize(
    "head", [("a", "uint8", (129,)), ("a", "object", (1,)), ("a", "uint8", (-1,)), ("a", "float64", (2, -1, -9))]
)
def test_what_describes_no_feature_is_refused_and_freed_D7(
    cache: SharedCache, head: tuple[str, str, tuple[int, ...]]
) -> None:
    reservation = cache.reserve(128)
    assert reservation is not None
    with pytest.raises(ProtocolError):
        borrowed_feature(reservation.view(), "image", [head], Layout((1,)))
    reservation.release()
    assert cache.occupied == 0


def test_what_lies_in_the_segment_already_is_held_as_it_is_D4(cache: SharedCache) -> None:
    out = cache.put(digest_of(0), feature_of(0, ITEM))
    cache.discard(digest_of(0))
    assert cache.put(digest_of(0), out) is out
    assert cache.occupied == cache.nbytes == ITEM
    other = SharedCache.create(ITEM)
    assert other.put(digest_of(0), out) is not out


def test_a_range_that_is_used_again_is_not_taken_for_the_one_before_D4() -> None:
    cache = SharedCache.create(128)
    cache.put(digest_of(1), feature_of(1, 128))
    second = cache.put(digest_of(2), feature_of(2, 128))
    cache.discard(digest_of(2))
    assert_equal(cache.put(digest_of(1), feature_of(1, 128)), 1, (128,))
    assert_equal(second, 2, (128,))


def test_adopting_takes_what_lies_there_and_never_copies_D4() -> None:
    cache = SharedCache.create(1024)
    assert cache.adopt(digest_of(1), feature_of(1, 100)) is None
    assert (len(cache), cache.occupied) == (0, 0)
    lying = cache.put(digest_of(1), feature_of(1, 100))
    assert cache.adopt(digest_of(1), feature_of(1, 100)) is lying
    cache.discard(digest_of(1))
    assert cache.adopt(digest_of(1), lying) is lying
    assert cache.occupied == cache.nbytes == 128


@pytest.mark.parametrize("leased", [True, False])
def test_two_digests_never_share_a_range_D4(cache: SharedCache, leased: bool) -> None:
    held = cache.put(digest_of(0), feature_of(0, ITEM))
    assert (cache.lease(digest_of(0)) if leased else held) is not None
    for number in range(1, SLOTS):
        assert cache.put(digest_of(number), held) is not held
    assert cache.occupied == cache.nbytes == SLOTS * ITEM


def test_a_segment_needs_room_D4() -> None:
    with pytest.raises(ConfigError):
        SharedCache.create(0)
    with pytest.raises(ConfigError):
        SharedCache.create(1 << 62)


def put_for(cache: SharedCache, tenant: str, numbers: range, nbytes: int = ITEM) -> int:
    """Put features of a tenant, and count those that are stored at once."""
    stored = 0
    for number in numbers:
        cache.put(digest_of(number), feature_of(number, nbytes), tenant=tenant)
        stored += digest_of(number) in cache
    return stored


def test_a_range_is_its_tenant_s_from_the_reservation_until_its_last_buffer_is_gone_S21(cache: SharedCache) -> None:
    reservation = cache.reserve(ITEM, tenant="A")
    assert reservation is not None
    assert cache.nbytes_of("A") == ITEM
    feature = feature_of(1, ITEM)
    reservation.view()[:] = feature.tensors["field0"].data
    out = adopt(cache, 1, reservation, feature)
    lease = cache.lease(digest_of(1))
    assert lease is not None
    cache.discard(digest_of(1))
    assert (cache.nbytes, cache.nbytes_of("A")) == (0, ITEM)
    cache.give_back(lease.id)
    assert out is not None
    assert cache.put(digest_of(1), out) is out, "held as it lies, whoever's it is"
    assert (cache.nbytes_of("A"), cache.nbytes_of("")) == (ITEM, 0)
    out = None
    cache.clear()
    assert cache.nbytes_of("A") == 0


def test_what_a_tenant_has_in_use_counts_against_its_share_S21(cache: SharedCache) -> None:
    assert put_for(cache, "B", range(4)) == 4
    assert put_for(cache, "A", range(10, 14)) == 4
    leases = [cache.lease(digest_of(number)) for number in range(10, 14)]
    assert all(leases)
    assert put_for(cache, "A", range(20, 30)) == 0, "it has its half, all in use"
    assert all(digest_of(number) in cache for number in range(4))
    for lease in leases:
        assert lease is not None
        cache.give_back(lease.id)
    assert put_for(cache, "A", range(30, 40)) == 10
    assert all(digest_of(number) in cache for number in range(4))


def test_a_debtor_whose_features_are_all_in_use_costs_others_no_error_S21(cache: SharedCache) -> None:
    out = [cache.put(digest_of(number), feature_of(number, ITEM), tenant="A") for number in range(SLOTS)]
    given = feature_of(50, ITEM)
    assert cache.put(digest_of(50), given, tenant="B") is given
    del out[2:4]
    assert put_for(cache, "B", range(60, 62)) == 2
    assert put_for(cache, "B", range(62, 64)) == 2, "it evicts its own"
    assert cache.nbytes_of("B") == 2 * ITEM


def scattered(cache: SharedCache) -> None:
    """Tenant B has every other range, A those between them."""
    for number in range(SLOTS):
        cache.put(digest_of(number), feature_of(number, ITEM), tenant="AB"[number % 2])


def test_what_fits_only_if_another_yields_what_it_is_entitled_to_is_not_stored_S21(cache: SharedCache) -> None:
    scattered(cache)
    given = feature_of(50, 2 * ITEM)
    assert cache.put(digest_of(50), given, tenant="A") is given, "two ranges are never side by side"
    assert all(digest_of(number) in cache for number in range(1, SLOTS, 2))


def test_a_range_in_one_piece_that_cannot_be_costs_its_tenant_a_few_features_and_not_all_S21() -> None:
    cache, item = SharedCache.create(200 << 16), 1 << 16
    for number in range(200):
        cache.put(digest_of(number), feature_of(number, item), tenant="AB"[number % 2])
    for number in range(200, 210):
        given = feature_of(number, 4 * item)
        assert cache.put(digest_of(number), given, tenant="A") is given
    assert cache.nbytes_of("B") == 100 * item
    assert cache.nbytes_of("A") == 96 * item, "as many bytes as it needs"


def test_a_newcomer_gets_its_range_in_one_piece_from_whoever_floods_S21() -> None:
    cache = SharedCache.create(ITEM * 64)
    draw = random.Random(2)
    put_for(cache, "B", range(4))
    for number in range(100, 1_100):
        put_for(cache, "A", range(number, number + 1), draw.randrange(1, 3 * ITEM))
    assert put_for(cache, "C", range(2_000, 2_002), 8 * ITEM) == 2
    assert all(digest_of(number) in cache for number in range(4))


NUMBERS = st.integers(0, 9)
PICKS = st.integers(0, 100)


class UseMachine(RuleBasedStateMachine):
    """Features are put, leased, held on to, reserved for and dropped in any order; what is in use never changes."""

    @initialize()
    def start(self) -> None:
        self.cache = SharedCache.create(2_048)
        self.window = Window.attach(self.cache.segment.fileno())
        self.out: list[tuple[int, tuple[int, ...], Feature]] = []
        self.leases: list[tuple[int, int, Lease]] = []
        self.reservations: list[Reservation] = []

    @rule(number=NUMBERS, sizes=st.lists(st.integers(0, 900), min_size=1, max_size=3).map(tuple), keeps=st.booleans())
    def put(self, number: int, sizes: tuple[int, ...], keeps: bool) -> None:
        if digest_of(number) in self.cache:
            return
        feature = self.cache.put(digest_of(number), feature_of(number, *sizes), tenant="ABC"[number % 3])
        if keeps:
            self.out.append((number, sizes, feature))

    @rule(number=NUMBERS)
    def lease(self, number: int) -> None:
        feature, lease = self.cache.get(digest_of(number)), self.cache.lease(digest_of(number))
        assert (feature is None) == (lease is None)
        if lease is not None and feature is not None:
            self.leases.append((number, feature.tensors["field0"].nbytes, lease))

    @rule(pick=PICKS)
    def give_back(self, pick: int) -> None:
        if self.leases:
            self.cache.give_back(self.leases.pop(pick % len(self.leases))[2].id)

    @rule(pick=PICKS)
    def let_go(self, pick: int) -> None:
        if self.out:
            self.out.pop(pick % len(self.out))

    @rule(nbytes=st.integers(0, 2_100), keeps=st.booleans(), tenant=st.sampled_from("ABC"))
    def reserve(self, nbytes: int, keeps: bool, tenant: str) -> None:
        reservation = self.cache.reserve(nbytes, tenant=tenant)
        if reservation is not None:
            reservation.view()[:] = bytes([255]) * reservation.nbytes
            if keeps:
                self.reservations.append(reservation)

    @rule(number=NUMBERS, pick=PICKS)
    def commit(self, number: int, pick: int) -> None:
        if not self.reservations:
            return
        reservation, feature = self.reservations.pop(pick % len(self.reservations)), feature_of(number, 64)
        reservation.view()[:64] = feature.tensors["field0"].data
        adopt(self.cache, number, reservation, feature)

    @rule(number=NUMBERS)
    def discard(self, number: int) -> None:
        self.cache.discard(digest_of(number))

    @rule()
    def clear(self) -> None:
        self.cache.clear()

    @invariant()
    def what_is_in_use_is_as_it_was(self) -> None:
        for number, sizes, feature in self.out:
            assert_equal(feature, number, sizes)
        for number, nbytes, lease in self.leases:
            assert self.window.view(lease.offset, nbytes) == feature_of(number, nbytes).tensors["field0"].data
        assert self.cache.leases == len(self.leases)
        assert self.cache.nbytes <= self.cache.occupied <= self.cache.capacity
        assert sum(map(self.cache.nbytes_of, "ABC")) == self.cache.occupied

    def teardown(self) -> None:
        self.out.clear()
        self.reservations.clear()
        while self.leases:
            self.give_back(0)
        self.cache.clear()
        assert self.cache.occupied == 0
        assert self.cache.reserve(2_048) is not None
        self.cache.close()


def test_bytes_in_use_never_change_and_everything_is_free_in_the_end_D4() -> None:
    checks = settings(
        max_examples=examples(80), stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    run_state_machine_as_test(UseMachine, settings=checks)
