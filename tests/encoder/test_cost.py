"""B1, B5, C5: what the encoder's bookkeeping costs, in embeddings and in operations. Counted, not timed.

Each check is run on the code as it is, and on mutants: wrong implementations that give the right answers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from time import thread_time_ns
from typing import Any

import pytest

from semel.core import Mask, Placeholder, Timeline
from semel.encoder.gather import Gathered, Slice, gather
from semel.encoder.plan import Planner, Request
from semel.encoder.residency import Residency
from tests.operations import Tally, operations, peak_bytes

MANY, FEW = 32_768, 64
Gather = Callable[[Timeline, int, int], Gathered]


def check_gathering_touches_only_the_window(gathers: Gather, many: int) -> None:
    """C5: three items of few cost as much as three of very many, and thirty about ten times as much."""
    most = inf
    for items in (FEW, many):
        timeline, found = Timeline.decoder(Placeholder(Tally(6 * index), 4) for index in range(items)), []
        for first in (items // 2, 0, items // 3, items - 3):
            step = partial(gathers, timeline, 6 * first, 6 * first + 18)
            found.append(operations(step, at_most=most))
            assert step().slices == tuple(Slice(index, 0, 4) for index in range(first, first + 3))
            assert peak_bytes(step) < 8_192
        most = 1.5 * max(found)
        assert max(found) > 0
    ten_times = operations(partial(gathers, timeline, 6, 6 + 180))
    assert 3 * max(found) < ten_times < 15 * max(found)


def test_gathering_costs_what_is_in_the_window_and_not_what_is_in_the_prompt_C5() -> None:
    check_gathering_touches_only_the_window(gather, MANY)


def over_all_items(timeline: Timeline, start: int, end: int) -> Gathered:
    slices, mask = [], bytearray(end - start)
    for index, place in enumerate(() if timeline.is_encoder else timeline):
        first, last = max(0, start - place.offset), min(place.length, end - place.offset)
        edges = place.embed_range(first, last) if first < last else (0, 0)
        if edges[0] < edges[1]:
            slices.append(Slice(index, *edges))
            bits = place.mask.bits[first:last] if place.mask else b"\x01" * (last - first)
            mask[place.offset + first - start : place.offset + last - start] = bits
    return Gathered(tuple(slices), bytes(mask))


def of_a_copy(timeline: Timeline, start: int, end: int) -> Gathered:
    """It looks at the items of the window only, but has listed all of them."""
    return gather(timeline, start, end) if list(timeline) else Gathered((), b"")


GATHER_MUTANTS = {mutant.__name__: mutant for mutant in (over_all_items, of_a_copy)}


@pytest.mark.parametrize("mutant", GATHER_MUTANTS.values(), ids=GATHER_MUTANTS)
def test_a_mutant_that_gathers_from_all_items_is_found_C5(mutant: Gather) -> None:
    with pytest.raises(AssertionError):
        check_gathering_touches_only_the_window(mutant, FEW**2)


def test_a_mutant_that_scans_for_the_window_is_found_in_gathering_C5(monkeypatch: pytest.MonkeyPatch) -> None:
    def scan(self: Timeline, start: int, end: int) -> tuple[int, int]:
        inside = [index for index, place in enumerate(self) if place.offset < end and place.end > start]
        return inside[0], inside[-1] + 1

    monkeypatch.setattr(Timeline, "window", scan)
    with pytest.raises(AssertionError):
        check_gathering_touches_only_the_window(gather, FEW**2)


def resident(items: int) -> Residency:
    """One request that holds so many items, and another one that holds them too."""
    residency = Residency(items)
    for request in ("r", "s"):
        for index in range(items):
            residency.allocate(request, Tally(index), f"item{index}", 1)
    residency.settle()
    return residency


def check_releasing_is_linear() -> None:
    """B5: an item of many costs as much as one of few, whether one is released or all are, and in whatever order.

    By operations, and by the processor's time for scans inside of C functions, which grow sixteen times here.
    """
    most = inf
    for items in (16, 256):
        first, last, all_ = resident(items), resident(items), resident(items)
        each = [
            operations(partial(first.release, "r", 0), at_most=most),
            operations(partial(last.release, "r", items - 1), at_most=most),
            operations(partial(all_.release_all, "r"), at_most=most * items) / items,
            operations(partial(all_.release_all, "s"), at_most=most * items) / items,
        ]
        assert not all_.held_inputs("r") and all_.reclaimable == items
        most = 1.2 * max(each)
    fastest = [min(released_each_ns(items) for _ in range(5)) for items in (128, 2_048)]
    assert fastest[1] < 3 * fastest[0], fastest


def released_each_ns(items: int) -> float:
    residency = Residency(items)
    for index in range(items):
        residency.allocate("r", index, index, 1)
    residency.settle()
    release = residency.release
    began = thread_time_ns()
    for index in range(items // 2, 0, -1):  # from the middle, so that a scan from either end is long
        release("r", index - 1)
        release("r", items - index)
    return (thread_time_ns() - began) / items


def test_releasing_an_item_costs_the_same_however_many_there_are_B5() -> None:
    check_releasing_is_linear()


RELEASE = Residency.release


def looking_at_every_input(self: Residency, request: str, index: int) -> None:
    held = self._inputs.get(request, {})
    for other, entry in held.items():
        if other == index and entry.referrers:
            break
    else:
        return
    RELEASE(self, request, index)


def looking_at_every_entry(self: Residency, request: str, index: int) -> None:
    RELEASE(self, request, index)
    self.reclaimable = sum(entry.size for entry in self._entries.values() if not entry.referrers)


def in_a_list(self: Residency, request: str, index: int) -> None:
    """As a queue of entries would be searched: in C, by identity, without a copy."""
    held = self._inputs.get(request, {})
    if index in held and held[index] in held.values():
        RELEASE(self, request, index)


def from_a_copy(self: Residency, request: str, index: int) -> None:
    if index in list(self._inputs.get(request, {})):
        RELEASE(self, request, index)


RELEASE_MUTANTS = {
    mutant.__name__: mutant for mutant in (looking_at_every_input, looking_at_every_entry, in_a_list, from_a_copy)
}


@pytest.mark.parametrize("release", RELEASE_MUTANTS.values(), ids=RELEASE_MUTANTS)
def test_a_mutant_whose_release_scans_is_found_B5(monkeypatch: pytest.MonkeyPatch, release: Any) -> None:
    monkeypatch.setattr(Residency, "release", release)
    with pytest.raises(AssertionError):
        check_releasing_is_linear()


def masked(name: str, keys: str, bits: tuple[int, ...] = (0, 1, 1, 0, 0, 1)) -> Request:
    """Items of six positions that take three embeddings each, one behind the other."""
    places = [Placeholder(len(bits) * index, len(bits), Mask(bits)) for index in range(len(keys))]
    return Request(name, Timeline.decoder(places), keys)


def check_capacity_counts_embeddings_of_shared_items() -> None:
    """B1: two items of three embeddings fit into six, and a second request that shows them takes nothing more."""
    residency = Residency(6)
    planner = Planner(residency)
    for name in ("r", "s"):
        request = masked(name, "ab")
        plan = planner.plan(request, computed=0, tokens=12, budget=6)
        assert (plan.tokens, plan.cut) == (12, None)
        assert (plan.encodes, plan.hits, plan.budget) == (((0, 1), (), 0) if name == "r" else ((), (0, 1), 6))
        planner.commit(request, plan)
        assert residency.free == 0
    residency.settle()
    assert (residency.counts.queries, residency.counts.hits) == (4, 2)
    residency.release_all("r")
    assert residency.reclaimable == 0
    residency.release_all("s")
    assert residency.reclaimable == 6
    assert planner.plan(masked("t", "c"), computed=0, tokens=6, budget=2).cut == 0


def test_capacity_counts_embeddings_and_not_positions_of_items_that_requests_share_B1() -> None:
    check_capacity_counts_embeddings_of_shared_items()


def test_a_mutant_whose_capacity_counts_positions_is_found_B1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Placeholder, "num_embeds", property(lambda self: self.length))
    with pytest.raises(AssertionError):
        check_capacity_counts_embeddings_of_shared_items()


def test_a_mutant_whose_requests_share_no_entry_is_found_B1(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Planner.plan

    def apart(self: Planner, request: Request, **step: int) -> Any:
        keys = [(request.id, key) for key in request.keys]
        object.__setattr__(request, "keys", keys)
        return plan(self, request, **step)

    monkeypatch.setattr(Planner, "plan", apart)
    with pytest.raises(AssertionError):
        check_capacity_counts_embeddings_of_shared_items()
