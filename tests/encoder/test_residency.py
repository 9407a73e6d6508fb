"""Residency, row by row."""

from __future__ import annotations

import pytest

from semel.encoder.eviction import CostAware, Eviction, OldestReleased
from semel.encoder.residency import Residency


def encoded(residency: Residency, request: str, *keys: str, size: int = 4) -> None:
    """Allocate and settle, so that the keys are resident and held by the request."""
    for index, key in enumerate(keys):
        residency.allocate(request, index, key, size)
    residency.settle()


def test_b3_asking_for_room_evicts_nothing() -> None:
    residency = Residency(10)
    encoded(residency, "a", "cat", "dog")
    residency.release_all("a")
    assert residency.can_allocate(10)
    assert not residency.can_allocate(10, promised=1)
    assert residency.settle().evicted == ()
    assert residency.size("cat") == 4


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
