"""Planning, row by row."""

from __future__ import annotations

from collections.abc import Hashable

import pytest

from semel.core import Mask, Placeholder, Timeline
from semel.encoder import Immediate, Plan, Planner, Request, Residency


def request(*spans: tuple[int, int], keys: str = "", name: str = "r") -> Request:
    """A request with items at `(offset, length)`; by default every item is another one."""
    timeline = Timeline.decoder(Placeholder(offset, length) for offset, length in spans)
    return Request(name, timeline, keys or [f"{name}{index}" for index in range(len(spans))])


def plan(
    asked: Request, *, computed: int = 0, tokens: int, budget: int = 100, capacity: int = 100, shift: int = 0
) -> Plan:
    return Planner(Residency(capacity), shift).plan(asked, computed=computed, tokens=tokens, budget=budget)


def test_c1_only_the_items_in_the_window_are_planned() -> None:
    asked = request((0, 4), (6, 4), (12, 4))
    assert plan(asked, tokens=6).encodes == (0,)
    assert plan(asked, tokens=7).encodes == (0, 1)
    assert plan(asked, computed=4, tokens=8).encodes == (1,)
    assert plan(asked, computed=9, tokens=1).encodes == (1,)
    assert plan(asked, computed=10, tokens=2).encodes == ()


def test_c1_the_window_looks_ahead_by_the_shift() -> None:
    asked = request((0, 4), (6, 4))
    assert plan(asked, tokens=6, shift=1).encodes == (0, 1)
    assert plan(asked, tokens=5, shift=1).encodes == (0,)


def test_c1_resident_items_are_held_and_not_encoded() -> None:
    residency = Residency(100)
    planner = Planner(residency)
    first, second = request((0, 4), keys="a"), request((0, 4), (4, 4), keys="ab", name="s")
    planner.commit(first, planner.plan(first, computed=0, tokens=4, budget=100))
    result = planner.plan(second, computed=0, tokens=8, budget=100)
    assert (result.hits, result.encodes, result.budget) == ((0,), (1,), 96)


def test_planning_changes_nothing() -> None:
    residency = Residency(8)
    before = (residency.free, residency.reclaimable, residency.counts.queries)
    Planner(residency).plan(request((0, 4)), computed=0, tokens=4, budget=100)
    residency.settle()
    assert (residency.free, residency.reclaimable, residency.counts.queries) == before


@pytest.mark.parametrize("limit", ["budget", "capacity"])
def test_c2_an_item_that_does_not_fit_ends_the_tokens_before_it(limit: str) -> None:
    result = plan(request((2, 4), (8, 4)), tokens=12, **{limit: 7})
    assert (result.tokens, result.encodes, result.cut) == (8, (0,), 1)


def test_c2_the_shift_is_part_of_the_cut() -> None:
    result = plan(request((2, 4), (8, 4)), tokens=12, budget=7, shift=2)
    assert (result.tokens, result.encodes) == (6, (0,))


@pytest.mark.parametrize(("computed", "shift"), [(0, 0), (2, 0), (1, 1), (0, 2)])
def test_c2_past_the_start_of_an_item_that_does_not_fit_no_token_is_computed(computed: int, shift: int) -> None:
    asked = request((computed + shift - (computed > 1), 4))
    result = plan(asked, computed=computed, tokens=4, budget=3, shift=shift)
    assert result == Plan(0, 3, cut=0)


def test_c2_without_chunking_a_window_that_covers_part_of_an_item_ends_before_it() -> None:
    planner = Planner(Residency(100), chunks_items=False)
    asked = request((2, 4), (8, 4))
    result = planner.plan(asked, computed=0, tokens=10, budget=100)
    assert (result.tokens, result.encodes, result.cut) == (8, (0,), None)
    assert planner.plan(asked, computed=0, tokens=12, budget=100).encodes == (0, 1)


def test_c2_without_chunking_the_shift_is_part_of_the_cut() -> None:
    planner = Planner(Residency(100), shift=1, chunks_items=False)
    assert planner.plan(request((4, 4)), computed=0, tokens=6, budget=100).tokens == 3


def test_c2_without_chunking_an_item_that_is_begun_is_finished() -> None:
    planner = Planner(Residency(100), chunks_items=False)
    result = planner.plan(request((2, 6)), computed=4, tokens=2, budget=100)
    assert (result.tokens, result.encodes) == (2, (0,))


def test_c2_without_chunking_a_cut_does_not_split_the_item_before() -> None:
    planner = Planner(Residency(100), shift=1, chunks_items=False)
    asked = request((2, 4), (8, 4), (12, 4))
    result = planner.plan(asked, computed=0, tokens=20, budget=8)
    assert (result.tokens, result.encodes, result.cut) == (7, (0,), 2)


def test_c3_the_same_item_twice_in_a_step_is_encoded_once() -> None:
    result = plan(request((0, 4), (4, 4), keys="aa"), tokens=8)
    assert (result.encodes, result.repeats, result.budget) == ((0,), (1,), 96)


def test_c3_the_same_item_in_two_requests_of_a_step_is_encoded_once() -> None:
    planner = Planner(Residency(100))
    first, second = request((0, 4), keys="a"), request((0, 4), keys="a", name="s")
    planner.commit(first, planner.plan(first, computed=0, tokens=4, budget=100))
    assert planner.plan(second, computed=0, tokens=4, budget=0) == Plan(4, 0, hits=(0,))


def test_c3_a_remote_item_is_loaded_and_costs_space_but_no_budget() -> None:
    def is_remote(key: Hashable) -> bool:
        return key == "a"

    asked = request((0, 4), (4, 4), keys="ab")
    result = Planner(Residency(8), is_remote=is_remote).plan(asked, computed=0, tokens=8, budget=4)
    assert (result.loads, result.encodes, result.budget) == ((0,), (1,), 0)
    assert Planner(Residency(7), is_remote=is_remote).plan(asked, computed=0, tokens=8, budget=4).cut == 1


def test_c4_an_item_with_no_embedding_in_the_window_is_not_planned() -> None:
    timeline = Timeline.decoder([Placeholder(0, 6, Mask([0, 0, 1, 1, 0, 0]))])
    asked = Request("r", timeline, "a")
    assert plan(asked, tokens=2).encodes == ()
    assert plan(asked, tokens=3).encodes == (0,)
    assert plan(asked, computed=4, tokens=2, capacity=0).tokens == 2


def test_a_hit_may_not_take_what_an_earlier_input_was_promised() -> None:
    residency = Residency(10)
    planner = Planner(residency)
    old = request((0, 6), keys="h", name="old")
    planner.commit(old, planner.plan(old, computed=0, tokens=6, budget=100))
    residency.settle()
    residency.release_all("old")
    asked = request((0, 6), (8, 6), keys="mh")
    result = planner.plan(asked, computed=0, tokens=14, budget=100)
    assert (result.tokens, result.encodes, result.hits, result.cut) == (8, (0,), (), 1)
    planner.commit(asked, result)
    assert residency.settle().evicted == ("h",)


def test_a_hit_shown_twice_claims_its_space_once() -> None:
    residency = Residency(10)
    residency.allocate("old", 0, "h", 6)
    residency.settle()
    residency.release_all("old")
    asked = request((0, 6), (6, 6), (12, 4), keys="hhm")
    result = Planner(residency).plan(asked, computed=0, tokens=16, budget=100)
    assert (result.hits, result.encodes) == ((0, 1), (2,))


def test_a_key_with_another_size_is_a_conflict_and_nothing_is_planned() -> None:
    residency = Residency(100)
    residency.allocate("old", 0, "a", 6)
    assert Planner(residency).plan(request((0, 4), keys="a"), computed=0, tokens=4, budget=9) == Plan(0, 9, conflict=0)
    assert plan(request((0, 4), (4, 5), keys="bb"), tokens=9, budget=9) == Plan(0, 9, conflict=1)


def test_a6_every_input_of_an_encoder_decoder_prompt_is_encoded_before_its_first_token() -> None:
    timeline = Timeline.encoder([Placeholder(0, 30), Placeholder(0, 20)])
    asked = Request("r", timeline, [("a", 0), ("a", 1)])
    planner = Planner(Residency(60, Immediate()), chunks_items=False)
    assert planner.plan(asked, computed=0, tokens=1, budget=50).encodes == (0, 1)
    assert planner.plan(asked, computed=0, tokens=1, budget=49) == Plan(0, 49, cut=1)
    assert planner.plan(asked, computed=1, tokens=1, budget=50) == Plan(1, 50)
