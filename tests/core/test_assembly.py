"""Prompts from their text and the places of their items."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core import Assembly, Digest, Item, Layout, Mask

LAYOUTS = [Layout((7, 7, 7)), Layout((1, 8, 8, 2), Mask([0, 1, 1, 0])), Layout((9,))]


def items(count: int) -> list[Item]:
    return [Item("image", Digest(bytes([index]) * 32)) for index in range(count)]


def test_items_stand_where_their_places_say_in_the_order_of_the_prompt() -> None:
    prompt = Assembly([10, 11, 12], [(2, 0), (0, 2), (1, 2)]).prompt(items(3), LAYOUTS)
    assert [*prompt.token_ids] == [9, 10, 11, 7, 7, 7, 1, 8, 8, 2, 12]
    assert [(place.offset, place.length, place.mask) for place in prompt.timeline] == [
        (0, 1, None),
        (3, 3, None),
        (6, 4, LAYOUTS[1].mask),
    ]
    assert prompt.items == (items(3)[2], items(3)[0], items(3)[1])


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 99))
def test_the_text_is_what_is_left_without_the_items(before: list[int], seed: int) -> None:
    places = [(index, offset) for index, offset in zip(_shuffled(len(before), seed), sorted(before), strict=True)]
    layouts = [LAYOUTS[index % 3] for index in range(len(before))]
    prompt = Assembly([100, 101, 102, 103, 104], places).prompt(items(len(before)), layouts)
    left = [*prompt.token_ids]
    for place in reversed(prompt.timeline[:]):
        del left[place.offset : place.end]
    assert left == [100, 101, 102, 103, 104]


@pytest.mark.parametrize(
    "places", [[], [(0, 0)], [(0, 0), (0, 1)], [(0, 1), (1, 0)], [(0, 0), (1, 4)], [(0, 0), (2, 0)]]
)
def test_an_item_without_a_place_with_two_or_behind_the_end_is_an_error(places: Sequence[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match=r"places|out of order"):
        Assembly([1, 2, 3], places).prompt(items(2), LAYOUTS[:2])


def _shuffled(count: int, seed: int) -> list[int]:
    return sorted(range(count), key=lambda index: (index * 7 + seed) % 11)
