"""Planning, row by row."""

from __future__ import annotations

import pytest

from semel.core import Placeholder, Timeline
from semel.encoder.eviction import Immediate
from semel.encoder.plan import Plan, Planner, Request
from semel.encoder.residency import Residency


def request(*spans: tuple[int, int], keys: str = "", name: str = "r") -> Request:
    """A request with items at `(offset, length)`; by default every item is another one."""
    timeline = Timeline.decoder(Placeholder(offset, length) for offset, length in spans)
    return Request(name, timeline, keys or [f"{name}{index}" for index in range(len(spans))])


def plan(
    asked: Request, *, computed: int = 0, tokens: int, budget: int = 100, capacity: int = 100, shift: int = 0
) -> Plan:
    return Planner(Residency(capacity), shift).plan(asked, computed=computed, tokens=tokens, budget=budget)


@pytest.mark.parametrize("limit", ["budget", "capacity"])
def test_c2_an_item_that_does_not_fit_ends_the_tokens_before_it(limit: str) -> None:
    result = plan(request((2, 4), (8, 4)), tokens=12, **{limit: 7})
    assert (result.tokens, result.encodes, result.cut) == (8, (0,), 1)


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


def test_c2_without_chunking_a_cut_does_not_split_the_item_before() -> None:
    planner = Planner(Residency(100), shift=1, chunks_items=False)
    asked = request((2, 4), (8, 4), (12, 4))
    result = planner.plan(asked, computed=0, tokens=20, budget=8)
    assert (result.tokens, result.encodes, result.cut) == (7, (0,), 2)


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
