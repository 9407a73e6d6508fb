"""LLaVA on the real engine: features, placeholders and answers as by vLLM itself, malformed features."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from semel.core import Feature, Layout
from semel.errors import FeatureRejected
from semel.processing import from_torch, to_torch
from semel.render import ChatRequest
from tests.engine.parity import Rig, compare, distinct, image_part, picture, random_chat, running
from tests.engine.rendering import compare_renderings, rebuilt

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
async def rig(tiny: Callable[[str], Path]) -> AsyncIterator[Rig]:
    async with running(tiny("llava"), max_model_len=4_096, limit_mm_per_prompt={"image": 4}) as started:
        yield started


@pytest.fixture(scope="module")
def chats() -> list[list[dict[str, Any]]]:
    rng = np.random.default_rng(0)
    return [random_chat(rng, [image_part(picture(rng)) for _ in range(index % 4)]) for index in range(24)]


async def test_twenty_four_random_chats_are_rendered_as_by_vllm_itself(
    either: Rig, chats: list[list[dict[str, Any]]]
) -> None:
    assert await compare_renderings(either, chats) == 36


async def test_twenty_four_random_chats_are_answered_as_by_vllm_itself(
    either: Rig, chats: list[list[dict[str, Any]]]
) -> None:
    assert distinct(await compare(either, chats)) >= 0.95


def with_more_embeddings(feature: Feature) -> Feature:
    return replace(feature, layout=Layout((*feature.layout.token_ids, feature.layout.token_ids[0])))


def with_fewer_pixels(feature: Feature) -> Feature:
    pixels = from_torch(to_torch(feature.tensors["pixel_values"])[..., 14:].contiguous())
    return replace(feature, tensors={"pixel_values": pixels})


@pytest.mark.parametrize(
    ("change", "message"),
    [(with_more_embeddings, "pixel_values gives 36 embeddings"), (with_fewer_pixels, r"takes float32\[1, 3, 84, 84\]")],
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
