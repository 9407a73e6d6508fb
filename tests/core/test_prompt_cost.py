"""A2, A5: what a scheduler asks for every step costs the same however long the prompt is. Counted, not timed.

Each check is run on the code as it is, and on mutants: wrong implementations that give the right answers.
"""

from __future__ import annotations

import gc
import importlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

import numpy as np
import pytest

from semel.core import Mask, Placeholder, Timeline
from tests.operations import Tally, c_calls, operations, peak_bytes

MANY, FEW = 32_768, 64


def reachable_types(root: object) -> set[type]:
    """The types of all that an object holds, besides its class."""
    found: dict[int, object] = {}
    waiting = [root]
    while waiting:
        one = waiting.pop()
        if id(one) not in found and not isinstance(one, type):
            found[id(one)] = one
            waiting += gc.get_referents(one)
    return {type(one) for one in found.values()}


def check_counts_are_kept_as_plain_ints(make: Callable[[list[bool]], Mask]) -> None:
    """A2: counts are kept as a list of ints, and asking for one is a look into that list, whatever its length."""
    masks = {length: make([position % 9 != 8 for position in range(length)]) for length in (9, 900)}
    for length, mask in masks.items():
        assert mask.count == length // 9 * 8
        assert mask.embed_range(3, length) == (3, length // 9 * 8)
        assert reachable_types(mask) == {Mask, bytes, list, int}
    for ask in (count_of, range_of):
        short, long = (operations(partial(ask, mask)) for mask in masks.values())
        assert 0 < long == short <= 40
        assert c_calls(partial(ask, masks[900])) == []
        assert peak_bytes(partial(ask, masks[900])) < 512


def count_of(mask: Mask) -> int:
    return mask.count


def range_of(mask: Mask) -> tuple[int, int]:
    return mask.embed_range(3, 9)


def test_the_counts_of_a_mask_are_computed_once_and_kept_as_plain_ints_A2() -> None:
    check_counts_are_kept_as_plain_ints(Mask)


@pytest.fixture(scope="module", autouse=True)
def torch_is_loaded() -> None:
    """Which takes longer than any of these."""
    importlib.import_module("torch")


def from_tensor(mask: Mask) -> int:
    import torch

    return int(torch.tensor(list(mask.bits)).sum())


COUNT_MUTANTS: dict[str, Callable[[Mask], int]] = {
    "summed from a tensor": from_tensor,
    "summed from an array": lambda mask: int(np.frombuffer(mask.bits, np.uint8).sum()),
    "summed from the bits": lambda mask: sum(mask.bits),
    "counted in the bits": lambda mask: mask.bits.count(1),
}


@pytest.mark.parametrize("count", COUNT_MUTANTS.values(), ids=COUNT_MUTANTS)
def test_a_mutant_whose_count_is_made_anew_each_time_is_found_A2(
    monkeypatch: pytest.MonkeyPatch, count: Callable[[Mask], int]
) -> None:
    monkeypatch.setattr(Mask, "count", property(count))
    with pytest.raises(AssertionError):
        check_counts_are_kept_as_plain_ints(Mask)


def test_a_mutant_whose_counts_are_kept_in_a_tensor_is_found_A2() -> None:
    import torch

    def kept(bits: list[bool]) -> Mask:
        mask = Mask(bits)
        mask._counts = torch.tensor(mask._counts)
        return mask

    with pytest.raises(AssertionError):
        check_counts_are_kept_as_plain_ints(kept)


def timeline_of(items: int) -> Timeline:
    """Items of four positions, six apart, whose numbers count who looks at them."""
    return Timeline.decoder(Placeholder(Tally(6 * index), 4) for index in range(items))


def check_a_window_costs_the_logarithm(many: int) -> None:
    """A5: three items at the beginning, in the middle or at the end, of few and of very many."""
    most = inf
    for items in (FEW, many):
        timeline, found = timeline_of(items), []
        for first in (items // 2, 0, items // 3, items - 3):
            start, end = 6 * first, 6 * (first + 2) + 1
            window = partial(timeline.window, start, end)
            found.append(operations(window, at_most=most))
            assert window() == (first, first + 3)
            assert peak_bytes(window) < 2_048
        most = 2.5 * max(found)  # log 32,768 is 2.5 times log 64
        assert max(found) > 0


def test_a_window_among_32768_items_costs_little_more_than_among_64_A5() -> None:
    check_a_window_costs_the_logarithm(MANY)


def forwards(self: Timeline, start: int, end: int) -> tuple[int, int]:
    lo = next((index for index, place in enumerate(self) if place.end > start), len(self))
    return lo, max(lo, next((index for index, place in enumerate(self) if place.offset >= end), len(self)))


def backwards(self: Timeline, start: int, end: int) -> tuple[int, int]:
    lo = hi = len(self)
    while lo and self[lo - 1].end > start:
        lo -= 1
    while hi > lo and self[hi - 1].offset >= end:
        hi -= 1
    return lo, hi


def by_one_edge(self: Timeline, start: int, end: int) -> tuple[int, int]:
    """What the test of reads let pass: one edge is searched for, the other one is counted up to."""
    lo = sum(place <= max(start, 0) for place in iter(self._ends))
    return lo, max(lo, bisect_left(self._offsets, end))


def in_copies(self: Timeline, start: int, end: int) -> tuple[int, int]:
    lo = bisect_right(self._ends[:], start)
    return lo, max(lo, bisect_left(self._offsets[:], end))


WINDOW_MUTANTS = {mutant.__name__: mutant for mutant in (forwards, backwards, by_one_edge, in_copies)}


@pytest.mark.parametrize("window", WINDOW_MUTANTS.values(), ids=WINDOW_MUTANTS)
def test_a_mutant_that_scans_for_the_window_is_found_A5(monkeypatch: pytest.MonkeyPatch, window: Any) -> None:
    monkeypatch.setattr(Timeline, "window", window)
    with pytest.raises(AssertionError):
        check_a_window_costs_the_logarithm(FEW**2)
