from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.core import Digest, Item, Layout, Mask, Modality
from semel.errors import InvalidRequest
from semel.render import expand_encoder
from semel.render.tokens.expand import expand

IMAGE, AUDIO = 7, 8
IDS: dict[int, Modality] = {IMAGE: "image", AUDIO: "audio"}


def item(modality: Modality, number: int) -> Item:
    return Item(modality, Digest(number.to_bytes(32, "big")))


def obvious(token_ids: list[int], items: list[Item], layouts: list[Layout]) -> tuple[list[int], list[tuple[int, int]]]:
    """One token at a time, and a search from the start for the k-th item of each modality."""
    out: list[int] = []
    places = []
    for position, token in enumerate(token_ids):
        if token not in IDS:
            out.append(token)
            continue
        rank = sum(earlier in IDS and IDS[earlier] == IDS[token] for earlier in token_ids[:position])
        index = [i for i, candidate in enumerate(items) if candidate.modality == IDS[token]][rank]
        places.append((index, len(out)))
        out.extend(layouts[index].token_ids)
    return out, places


@settings(deadline=None)
@given(
    token_ids=st.lists(st.integers(0, 12), max_size=40),
    seed=st.randoms(use_true_random=False),
    lengths=st.lists(st.integers(0, 5), min_size=40, max_size=40),
)
def test_s16_assembly_does_what_the_obvious_way_does(
    token_ids: list[int], seed: random.Random, lengths: list[int]
) -> None:
    modalities = [IDS[token] for token in token_ids if token in IDS]
    seed.shuffle(modalities)
    items = [item(modality, number) for number, modality in enumerate(modalities)]
    layouts = [
        Layout((IMAGE, *[number] * length), Mask([0] + [1] * length) if length % 2 else None)
        for number, length in zip(range(len(items)), lengths, strict=False)
    ]
    prompt = expand(token_ids, placeholder_ids=IDS, items=items, layouts=layouts)
    expected, places = obvious(token_ids, items, layouts)
    assert prompt.token_ids == expected
    assert prompt.items == tuple(items[index] for index, _ in places)
    assert [place.offset for place in prompt.timeline] == [offset for _, offset in places]
    for (index, _), place in zip(places, prompt.timeline, strict=True):
        assert place.length == len(layouts[index])
        assert place.mask is layouts[index].mask, "masks are shared, never copied (A4)"


@pytest.mark.parametrize("token_ids", [[1, 2], [IMAGE, 1, IMAGE], [IMAGE, AUDIO], [AUDIO]])
def test_s14_a_count_that_does_not_fit_is_refused(token_ids: list[int]) -> None:
    with pytest.raises(InvalidRequest, match=r"placeholder tokens for \d+ (image|audio) items"):
        expand(token_ids, placeholder_ids=IDS, items=[item("image", 1)], layouts=[Layout((1, 2))])


def test_s14_an_item_of_a_modality_without_a_placeholder_token_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="0 placeholder tokens for 1 video items"):
        expand([1], placeholder_ids=IDS, items=[item("video", 1)], layouts=[Layout((1,))])


def test_s14_a_placeholder_token_inside_a_layout_is_not_a_place_for_another_item() -> None:
    layout = Layout((IMAGE, IMAGE, IMAGE))
    prompt = expand([IMAGE, 1], placeholder_ids=IDS, items=[item("image", 1)], layouts=[layout])
    assert prompt.token_ids == [IMAGE, IMAGE, IMAGE, 1]


def test_a6_an_encoder_decoder_prompt_keeps_the_decoders_tokens_and_shows_the_item_to_the_encoder() -> None:
    layout = Layout((0,) * 1500)
    prompt = expand_encoder([50258, 50259], item=item("audio", 1), layout=layout)
    assert prompt.token_ids == [50258, 50259]
    assert prompt.encoder_token_ids == (0,) * 1500
    assert [(place.offset, place.length) for place in prompt.timeline] == [(0, 1500)]
    assert prompt.timeline.window(1400, 1401) == (0, 1)
