"""Gemma 3 on the real engine, a family with embedding masks whose items are set off by blank lines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from semel.core import Feature, Layout, Mask
from semel.errors import FeatureRejected
from semel.processing import from_torch, to_torch
from semel.render import ChatRequest
from tests.engine.parity import Rig, compare, distinct, image_part, picture, random_chat, running, words
from tests.engine.rendering import Place, bare_rendering, our_rendering, rebuilt, same_items

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

Chat = list[dict[str, Any]]


@pytest.fixture(scope="module")
async def rig(tiny: Callable[[str], Path]) -> AsyncIterator[Rig]:
    async with running(tiny("gemma3"), max_model_len=4_096, limit_mm_per_prompt={"image": 4}) as started:
        yield started


@pytest.fixture(scope="module")
def chats() -> list[Chat]:
    rng = np.random.default_rng(0)
    chats = [random_chat(rng, [image_part(picture(rng)) for _ in range(index % 4)]) for index in range(24)]
    return [*chats, *(surrounded(rng, before, behind) for before in NEWLINES for behind in NEWLINES)]


NEWLINES = ("", "\n", "\n\n")


def surrounded(rng: np.random.Generator, before: str, behind: str) -> Chat:
    """Two images that touch, with newlines of the client's own around them."""
    first, second = image_part(picture(rng)), image_part(picture(rng))
    texts = [{"type": "text", "text": words(rng) + before}, {"type": "text", "text": behind + words(rng)}]
    return [{"role": "user", "content": [texts[0], first, second, texts[1]]}]


def embeddings(place: Place) -> list[int]:
    offset, length, mask = place
    return [offset + index for index in range(length) if mask is None or mask[index]]


async def test_random_chats_are_rendered_as_by_vllm_itself(either: Rig, chats: list[Chat]) -> None:
    """vLLM's places begin and end with a token of newlines, which two images may share; ours are within these."""
    compared = 0
    for chat in chats:
        await either.engine.reset()
        bare, ours = await bare_rendering(either, chat), await our_rendering(either, chat)
        assert ours.token_ids == bare.token_ids
        for mine, its in zip(ours.places.get("image", ()), bare.places.get("image", ()), strict=True):
            assert embeddings(mine) == embeddings(its)
            assert (mine[0], mine[1]) == (its[0] + 1, its[1] - 2)
        compared += same_items(ours, bare)
    await either.engine.reset()
    assert compared == 54


async def test_random_chats_are_answered_as_by_vllm_itself(either: Rig, chats: list[Chat]) -> None:
    assert distinct(await compare(either, chats)) >= 0.95


async def test_the_spelling_of_the_placeholder_stays_text_S14(rig: Rig) -> None:
    rng = np.random.default_rng(3)
    content = [image_part(picture(rng)), {"type": "text", "text": "what is <start_of_image> ?"}]
    rendered = await rig.pipeline.chat(ChatRequest([{"role": "user", "content": content}]))
    assert len(rendered.prompt.items) == 1
    await rig.answer(rendered)


def with_tensor(name: str, change: Callable[[Any], Any]) -> Callable[[Feature], Feature]:
    def changed(feature: Feature) -> Feature:
        value = from_torch(change(to_torch(feature.tensors[name])).contiguous())
        return replace(feature, tensors={**feature.tensors, name: value})

    return changed


def without_mask(feature: Feature) -> Feature:
    return replace(feature, layout=Layout(feature.layout.token_ids))


def with_another_mask(feature: Feature) -> Feature:
    tokens = feature.layout.token_ids
    return replace(feature, layout=Layout(tokens, Mask([1] + [0] * (len(tokens) - 1))))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_tensor("num_patches", lambda n: n + 1), r"num_patches is \[2\]"),
        (with_tensor("pixel_values", lambda pixels: pixels[..., 14:]), r"takes float32\[1, 3, 112, 112\]"),
        (without_mask, "pixel_values gives 16 embeddings"),
        (with_another_mask, "pixel_values gives 16 embeddings"),
    ],
)
async def test_a_malformed_feature_is_refused_and_the_engine_lives_on_S9(
    rig: Rig, change: Callable[[Feature], Feature], message: str
) -> None:
    rng = np.random.default_rng(1)
    rendered = await rig.pipeline.chat(ChatRequest(random_chat(rng, [image_part(picture(rng))])))
    (feature,) = rendered.features.values()
    expected = await rig.answer(rendered)
    with pytest.raises(FeatureRejected, match=message):
        await rig.answer(rebuilt(rendered, change(feature)))
    assert await rig.answer(rendered) == expected
