"""Residency, row by row."""

from __future__ import annotations

import pytest

from semel.encoder import CostAware, Eviction, Immediate, OldestReleased, Residency


def encoded(residency: Residency, request: str, *keys: str, size: int = 4) -> None:
    """Allocate and settle, so that the keys are resident and held by the request."""
    for index, key in enumerate(keys):
        residency.allocate(request, index, key, size)
    residency.settle()


def test_b1_an_entry_is_shared_by_all_requests_that_show_its_item() -> None:
    residency = Residency(10)
    encoded(residency, "a", "cat")
    residency.hold("b", 0, "cat")
    assert residency.free == 6
    assert residency.held_inputs("a") == residency.held_inputs("b") == {0}


def test_b2_an_entry_without_referrers_stays_and_is_found_again() -> None:
    residency = Residency(10)
    encoded(residency, "a", "cat")
    residency.release("a", 0)
    assert (residency.free, residency.reclaimable) == (6, 4)
    residency.hold("b", 0, "cat")
    assert (residency.free, residency.reclaimable) == (6, 0)


def test_b2_the_oldest_released_entry_is_evicted_first() -> None:
    residency = Residency(12)
    encoded(residency, "a", "cat", "dog", "owl")
    for index in (1, 0, 2):
        residency.release("a", index)
    residency.allocate("b", 0, "fox", 8)
    assert residency.settle().evicted == ("dog", "cat")


def test_b3_asking_for_room_evicts_nothing() -> None:
    residency = Residency(10)
    encoded(residency, "a", "cat", "dog")
    residency.release_all("a")
    assert residency.can_allocate(10)
    assert not residency.can_allocate(10, promised=1)
    assert residency.settle().evicted == ()
    assert residency.size("cat") == 4


def test_b3_held_entries_are_no_room() -> None:
    residency = Residency(10)
    encoded(residency, "a", "cat", "dog")
    residency.release("a", 0)
    assert residency.can_allocate(6)
    assert not residency.can_allocate(7)


def test_b4_releasing_what_is_not_held_changes_nothing() -> None:
    residency = Residency(10)
    encoded(residency, "a", "cat")
    residency.reset()
    residency.release("a", 0)
    residency.release("nobody", 3)
    assert residency.held_inputs("a") == set()
    assert residency.free == 10


def test_b5_an_item_shown_twice_in_a_request_is_held_until_its_last_occurrence() -> None:
    residency = Residency(10)
    encoded(residency, "a", "cat", "dog", "cat")
    residency.release("a", 0)
    assert residency.reclaimable == 0
    residency.release("a", 2)
    assert residency.reclaimable == 4


def test_b6_an_eviction_is_reported_once() -> None:
    residency = Residency(4)
    encoded(residency, "a", "cat")
    residency.release_all("a")
    residency.allocate("b", 0, "dog", 4)
    assert residency.settle().evicted == ("cat",)
    assert residency.settle().evicted == ()


def test_b6_what_is_evicted_and_allocated_again_in_one_pass_is_not_reported() -> None:
    residency = Residency(8)
    encoded(residency, "a", "cat", "dog")
    residency.release_all("a")
    residency.allocate("b", 0, "owl", 4)
    residency.allocate("b", 1, "cat", 4)
    assert residency.settle().evicted == ("dog",)


def test_b7_a_cancelled_encode_leaves_nothing_behind() -> None:
    residency = Residency(8)
    residency.allocate("a", 0, "cat", 4)
    residency.release_all("a")
    assert residency.size("cat") is None
    assert residency.free == 8
    assert residency.settle().evicted == ()


def test_b7_a_cancelled_encode_of_an_evicted_entry_is_reported_as_evicted() -> None:
    residency = Residency(4)
    encoded(residency, "a", "cat")
    residency.release_all("a")
    residency.allocate("b", 0, "dog", 4)
    residency.release_all("b")
    residency.allocate("c", 0, "cat", 4)
    residency.release_all("c")
    assert residency.settle().evicted == ("cat",)


def test_b7_the_next_referrer_takes_a_cancelled_encode_over() -> None:
    residency = Residency(8)
    residency.allocate("a", 0, "cat", 4)
    residency.hold("b", 3, "cat")
    residency.hold("c", 1, "cat")
    residency.release_all("a")
    assert residency.planner("cat") == ("b", 3)
    assert residency.settle().taken_over == (("b", 3),)
    assert (residency.counts.queries, residency.counts.hits) == (2, 1)


def test_b7_an_adopted_encode_is_compute_until_it_is_cancelled_too() -> None:
    residency = Residency(8)
    residency.allocate("a", 0, "cat", 4)
    residency.hold("b", 0, "cat")
    residency.release_all("a")
    assert residency.adopted == 4
    residency.release_all("b")
    assert (residency.adopted, residency.free) == (0, 8)


def test_b7_a_request_that_was_not_scheduled_takes_nothing_over() -> None:
    residency = Residency(8)
    residency.allocate("a", 0, "cat", 4)
    residency.hold("b", 0, "cat")
    residency.hold("c", 0, "cat")
    residency.release_all("a")
    assert residency.settle(scheduled={"c"}).taken_over == (("c", 0),)
    assert residency.held_inputs("b") == set()


def test_b7_after_the_pass_an_encode_cannot_be_cancelled() -> None:
    residency = Residency(8)
    encoded(residency, "a", "cat")
    residency.release_all("a")
    assert residency.size("cat") == 4
    assert residency.settle().taken_over == ()


@pytest.mark.parametrize("eviction", [OldestReleased, CostAware])
def test_a_discarded_entry_is_gone_for_all_and_its_tensor_goes_even_if_it_is_allocated_again(
    eviction: type[Eviction],
) -> None:
    residency = Residency(8, eviction())
    encoded(residency, "r", "wrong", "right")
    residency.hold("s", 0, "wrong")
    residency.settle()
    residency.discard("wrong")
    assert residency.size("wrong") is None
    assert (residency.free, residency.reclaimable) == (4, 0)
    assert (*residency.held_inputs("r"), *residency.held_inputs("s")) == (1,)
    residency.allocate("t", 0, "wrong", 4)
    assert residency.settle().evicted == ("wrong",), "where an eviction that is taken back (B6) would not be told"
    residency.release_all("t")
    residency.release_all("r")
    residency.allocate("u", 0, "large", 8)
    assert sorted(map(str, residency.settle().evicted)) == ["right", "wrong"], "it is a candidate once"


def test_what_is_not_there_is_not_discarded() -> None:
    residency = Residency(4)
    residency.discard("unknown")
    assert residency.settle().evicted == ()


def test_b8_reset_empties_everything() -> None:
    residency = Residency(8, CostAware())
    encoded(residency, "a", "cat", "dog")
    residency.release("a", 0)
    residency.reset()
    assert (residency.free, residency.reclaimable) == (8, 0)
    assert residency.size("dog") is None
    encoded(residency, "b", "owl", size=8)
    assert residency.settle().evicted == ()


def test_b9_an_encoder_decoder_cache_keeps_nothing_and_never_grows_past_its_capacity() -> None:
    residency = Residency(8, Immediate())
    encoded(residency, "a", "cat")
    for _ in range(3):
        residency.release_all("a")
    assert residency.free == residency.capacity
    assert residency.settle().evicted == ("cat",)


def test_the_capacity_may_be_zero() -> None:
    residency = Residency(0)
    assert not residency.can_allocate(1)
    assert residency.can_allocate(0)


def test_counts_are_of_references_that_outlived_their_pass() -> None:
    residency = Residency(8)
    residency.allocate("a", 0, "cat", 4)
    residency.hold("a", 1, "cat")
    residency.hold("a", 1, "cat")
    residency.allocate("b", 0, "dog", 4)
    residency.release_all("b")
    residency.settle()
    residency.hold("c", 0, "cat")
    residency.settle()
    assert (residency.counts.queries, residency.counts.hits, residency.counts.evictions) == (3, 2, 0)


@pytest.mark.parametrize("eviction", [OldestReleased, CostAware])
def test_b2_every_policy_evicts_only_what_nobody_refers_to(eviction: type[Eviction]) -> None:
    residency = Residency(12, eviction())
    encoded(residency, "a", "cat", "dog", "owl")
    residency.release("a", 1)
    residency.hold("b", 0, "dog")
    residency.release("a", 2)
    residency.allocate("c", 0, "fox", 4)
    assert residency.settle().evicted == ("owl",)


def test_cost_aware_keeps_what_is_expensive_per_embedding() -> None:
    residency = Residency(12, CostAware())
    for index, (key, cost) in enumerate({"cheap": 4.0, "dear": 40.0, "fair": 8.0}.items()):
        residency.allocate("a", index, key, 4, cost=cost)
    residency.settle()
    residency.release_all("a")
    residency.allocate("b", 0, "new", 8)
    assert residency.settle().evicted == ("cheap", "fair")


def test_cost_aware_keeps_what_is_shown_often() -> None:
    residency = Residency(8, CostAware())
    encoded(residency, "a", "often", "once")
    for request in ("b", "c"):
        residency.hold(request, 0, "often")
    for request in ("b", "c", "a"):
        residency.release_all(request)
    residency.allocate("d", 0, "new", 4)
    assert residency.settle().evicted == ("once",)


def test_cost_aware_lets_go_in_the_end_of_what_is_never_shown_again() -> None:
    residency = Residency(8, CostAware())
    residency.allocate("a", 0, "dear", 4, cost=20.0)
    residency.settle()
    residency.release_all("a")
    for round_ in range(7):
        residency.allocate("b", 0, round_, 4)
        residency.settle()
        residency.release_all("b")
    assert residency.size("dear") is None
