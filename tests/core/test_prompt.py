"""A1-A6: masks, placeholders, timelines, prompts, each against a slow and obvious model."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core import Digest, Item, Mask, Placeholder, Prompt, Timeline

masks = st.lists(st.booleans(), max_size=30)


@st.composite
def placeholders(draw: st.DrawFn, offset: int = 0) -> Placeholder:
    bits = draw(st.one_of(st.none(), masks))
    length = draw(st.integers(0, 12)) if bits is None else len(bits)
    return Placeholder(offset, length, None if bits is None else Mask(bits))


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    position, places = 0, []
    for _ in range(draw(st.integers(0, 12))):
        position += draw(st.integers(0, 5))
        place = draw(placeholders(offset=position))
        places.append(place)
        position = place.end
    return Timeline.decoder(places)


def test_an_empty_mask_has_no_embedding_and_no_mask_means_all_positions_A3() -> None:
    assert Placeholder(3, 0, Mask([])).num_embeds == 0
    assert Placeholder(3, 7).num_embeds == 7


@given(masks, st.data())
def test_the_embedding_range_of_a_sub_range_is_exact_at_both_edges_A3(bits: list[bool], data: st.DataObject) -> None:
    place = Placeholder(5, len(bits), Mask(bits))
    start = data.draw(st.integers(0, len(bits)))
    end = data.draw(st.integers(start, len(bits)))
    assert place.embed_range(start, end) == (sum(bits[:start]), sum(bits[:end]))


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (0, 4), (2, 1)])
def test_a_range_outside_the_placeholder_is_refused_A3(start: int, end: int) -> None:
    with pytest.raises(ValueError, match="sub-range"):
        Placeholder(0, 3).embed_range(start, end)


def test_a_placeholder_that_contradicts_itself_is_refused_A1() -> None:
    with pytest.raises(ValueError, match="mask over 2"):
        Placeholder(0, 3, Mask([True, False]))
    with pytest.raises(ValueError, match="negative"):
        Placeholder(-1, 3)


def test_overlapping_placeholders_are_refused_by_the_pair_A4() -> None:
    with pytest.raises(ValueError, match=r"placeholders 1 and 2 overlap: .*offset=4.*offset=6"):
        Timeline.decoder([Placeholder(0, 2), Placeholder(4, 3), Placeholder(6, 1)])


def test_unsorted_placeholders_are_refused_by_the_pair_A4() -> None:
    with pytest.raises(ValueError, match="placeholders 0 and 1 are out of order"):
        Timeline.decoder([Placeholder(9, 1), Placeholder(4, 3)])


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), max_size=6))
def test_a_timeline_is_built_exactly_when_no_two_placeholders_collide_A4(spans: list[tuple[int, int]]) -> None:
    places = [Placeholder(offset, length) for offset, length in spans]
    fine = all(left.end <= right.offset for left, right in pairwise(places))
    if fine:
        assert list(Timeline.decoder(places)) == places
    else:
        with pytest.raises(ValueError, match="placeholders"):
            Timeline.decoder(places)


@given(timelines(), st.integers(0, 80), st.integers(0, 80))
def test_a_window_holds_what_overlaps_it_A5(timeline: Timeline, start: int, end: int) -> None:
    lo, hi = timeline.window(start, end)
    first = next((i for i, place in enumerate(timeline) if place.end > start), len(timeline))
    last = next((i for i, place in enumerate(timeline) if place.offset >= end), len(timeline))
    assert (lo, hi) == (first, max(first, last))
    inside = {i for i, p in enumerate(timeline) if p.length and p.offset < end and p.end > start}
    assert inside <= set(range(lo, hi))


@given(timelines(), st.integers(-9, 9), st.integers(-9, 9))
def test_a_window_that_begins_before_the_prompt_does_not_wrap_round_A5(
    timeline: Timeline, start: int, end: int
) -> None:
    assert timeline.window(start, end) == timeline.window(max(start, 0), max(end, 0))
    if start < 0 and end < 0:
        assert timeline.window(start, end)[0] == next((i for i, p in enumerate(timeline) if p.end > 0), len(timeline))


def test_the_window_of_an_encoder_always_begins_at_the_first_item_A6() -> None:
    timeline = Timeline.encoder([Placeholder(0, 1500), Placeholder(0, 1500)])
    assert timeline.window(0, 4) == (0, 2)
    assert timeline.window(4_000, 4_001) == (0, 2)


def test_an_encoder_placeholder_off_zero_is_refused_A6() -> None:
    with pytest.raises(ValueError, match="encoder placeholder 1 must be at offset 0"):
        Timeline.encoder([Placeholder(0, 10), Placeholder(1, 10)])


def test_an_encoder_prompt_needs_room_for_its_longest_item_A6() -> None:
    item = Item("audio", Digest(bytes(32)))
    timeline = Timeline.encoder([Placeholder(0, 400), Placeholder(0, 4)])
    with pytest.raises(ValueError, match="ends at 400, the prompt at 4"):
        Prompt([0], timeline, (item, item), encoder_token_ids=[0] * 4)


def test_a_prompt_needs_an_item_for_every_placeholder_and_room_for_all_A4() -> None:
    item = Item("image", Digest(bytes(32)))
    timeline = Timeline.decoder([Placeholder(1, 3)])
    assert len(Prompt([0] * 4, timeline, (item,)).items) == 1
    with pytest.raises(ValueError, match="0 items for 1 placeholders"):
        Prompt([0] * 4, timeline, ())
    with pytest.raises(ValueError, match="ends at 4, the prompt at 3"):
        Prompt([0] * 3, timeline, (item,))


@pytest.mark.parametrize("known", [0, 1, 2, 3])
def test_a4_a_timeline_that_grew_equals_one_built_at_once(known: int) -> None:
    placeholders = [Placeholder(0, 4), Placeholder(4, 2), Placeholder(9, 3)]
    grown = Timeline.decoder(placeholders[:known]).followed_by(placeholders[known:])
    assert grown == Timeline.decoder(placeholders)
    assert grown.window(5, 10) == (1, 3)


def test_a4_what_is_new_must_be_behind_what_is_there() -> None:
    with pytest.raises(ValueError, match="overlap"):
        Timeline.decoder([Placeholder(0, 4)]).followed_by([Placeholder(3, 2)])


def test_a5_a_placeholder_far_away_costs_no_memory() -> None:
    timeline = Timeline.decoder([Placeholder(0, 1), Placeholder(10**15, 1)])
    assert timeline.window(5, 10**15 + 1) == (1, 2)
    assert timeline.window(10**15 + 1, 10**15 + 2) == (2, 2)
    assert sum(len(table) for table in (timeline._ends_before, timeline._offsets_before)) < 100
