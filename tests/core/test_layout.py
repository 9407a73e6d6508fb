"""Layouts: kept as runs, held against what they are made of."""

from __future__ import annotations

import pickle
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core import Layout, Mask, pack_token_ids, unpack_token_ids

MAX = 1 << 20
SIZES = st.integers(0, 4)
tokens = st.lists(st.tuples(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 2), SIZES), max_size=12).map(
    lambda runs: tuple(chain.from_iterable((token,) * count for token, count in runs))
)


@st.composite
def values(draw: st.DrawFn) -> tuple[tuple[int, ...], bytes | None]:
    """Tokens and bits, in runs and alone."""
    ids = draw(tokens)
    bits = draw(st.none() | st.lists(st.sampled_from((0, 1)), min_size=len(ids), max_size=len(ids)).map(bytes))
    return ids, bits


def layout_of(value: tuple[tuple[int, ...], bytes | None]) -> Layout:
    ids, bits = value
    return Layout(ids, None if bits is None else Mask(bits))


@given(values())
def test_a_layout_has_what_it_was_made_of_A4(value: tuple[tuple[int, ...], bytes | None]) -> None:
    ids, bits = value
    layout = layout_of(value)
    mask = layout.mask
    assert (layout.token_ids, None if mask is None else mask.bits) == value
    assert len(layout) == len(ids)
    assert layout.num_embeds == (len(ids) if bits is None else sum(bits))
    assert pickle.loads(pickle.dumps(layout)) == layout


@given(values(), values())
def test_layouts_are_equal_if_what_they_are_made_of_is(
    one: tuple[tuple[int, ...], bytes | None], other: tuple[tuple[int, ...], bytes | None]
) -> None:
    assert (layout_of(one) == layout_of(other)) == (one == other)
    again = layout_of(one)
    assert again == layout_of(one)
    assert hash(again) == hash(layout_of(one))


def kept_as_they_came(token_runs: bytes, mask_runs: bytes | None) -> Layout:
    """A mutant: runs that could be shorter are taken."""
    layout = Layout(())
    layout.token_runs, layout.mask_runs, layout._length = token_runs, mask_runs, 3
    return layout


@pytest.mark.parametrize(
    ("token_runs", "mask_runs"),
    [([7, 1, 7, 2], None), ([7, 3, 8, 0], None), ([7, 0, 8, 3], None), ([7, 3], [1, 0, 2]), ([7, 3], [3, 0])],
)
def test_runs_that_could_be_shorter_are_refused_for_they_would_be_another_layout(
    token_runs: list[int], mask_runs: list[int] | None
) -> None:
    packed = pack_token_ids(token_runs), None if mask_runs is None else pack_token_ids(mask_runs)
    with pytest.raises(ValueError, match=r"broken|more runs"):
        Layout.of_runs(*packed, max_tokens=MAX)
    kept = kept_as_they_came(*packed)
    assert kept != Layout(kept.token_ids, kept.mask), "what it would be without the check"


@given(values())
def test_runs_come_back_as_the_layout_that_they_are_of(value: tuple[tuple[int, ...], bytes | None]) -> None:
    layout = layout_of(value)
    found = Layout.of_runs(layout.token_runs, layout.mask_runs, max_tokens=MAX)
    assert (found, found.num_embeds, len(found)) == (layout, layout.num_embeds, len(layout))


@pytest.mark.parametrize(
    ("token_runs", "mask_runs", "message"),
    [
        (bytes(6), None, "no int32"),
        (bytes(4), None, "broken"),
        (pack_token_ids([1, -1]), None, "broken"),
        (pack_token_ids([1, 2]), pack_token_ids([3, -1]), "broken"),
        (pack_token_ids([1, 2]), pack_token_ids([1]), "mask over 1"),
        (pack_token_ids([1, 11]), None, "has 11 tokens, at most 10"),
        (pack_token_ids([1, 2]), pack_token_ids([11]), "at most 10"),
    ],
)
def test_broken_runs_are_refused_S9(token_runs: bytes, mask_runs: bytes | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout.of_runs(token_runs, mask_runs, max_tokens=10)


def test_a_token_that_is_no_int32_is_refused() -> None:
    with pytest.raises(ValueError, match="no int32"):
        Layout((1 << 31,))


def test_a_long_run_takes_no_more_than_a_short_one() -> None:
    """Control: a layout in which no two neighbours are equal takes 8 bytes a token."""
    assert Layout((7,) * 100_000).nbytes == Layout((7,)).nbytes == 8
    assert Layout(tuple(range(1_000))).nbytes == 8_000
    assert unpack_token_ids(Layout((7, 7, 8)).token_runs) == [7, 2, 8, 1]


def test_masks_asked_for_again_are_one_object_A4() -> None:
    one, other = Layout((1, 2), Mask([0, 1])), Layout((3, 4), Mask([0, 1]))
    assert one.mask is one.mask is other.mask
