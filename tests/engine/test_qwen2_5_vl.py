"""Qwen2.5-VL on the real engine: features, placeholders and answers as by vLLM itself, malformed features."""

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
from tests.engine.parity import Rig, compare, data_url, distinct, image_part, picture, random_chat, running, video
from tests.engine.rendering import compare_renderings, rebuilt

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
async def rig(tiny: Callable[[str], Path]) -> AsyncIterator[Rig]:
    arguments = {"max_model_len": 4_096, "limit_mm_per_prompt": {"image": 4, "video": 2}}
    async with running(tiny("qwen2.5-vl"), **arguments) as started:
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


def video_part(data: bytes) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": data_url(data, "video/mp4")}}


@pytest.fixture(scope="module")
def video_chats() -> list[list[dict[str, Any]]]:
    """Videos of three codecs, alone, two of them, and with an image."""
    rng = np.random.default_rng(5)
    kinds = [("libx264", "mp4"), ("mpeg4", "mp4"), ("libvpx", "webm")]
    chats = []
    for index in range(12):
        items = [video_part(video(rng, *kinds[index % 3])) for _ in range(1 + index % 2)]
        items += [image_part(picture(rng))] * (index % 4 == 3)
        chats.append(random_chat(rng, items))
    return chats


async def test_chats_with_videos_are_rendered_as_by_vllm_itself(
    either: Rig, video_chats: list[list[dict[str, Any]]]
) -> None:
    assert await compare_renderings(either, video_chats) == 21


async def test_chats_with_videos_are_answered_as_by_vllm_itself(
    either: Rig, video_chats: list[list[dict[str, Any]]]
) -> None:
    assert distinct(await compare(either, video_chats)) >= 0.9


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e9])
async def test_a_video_of_impossible_length_is_refused_and_the_engine_lives_on_S9(rig: Rig, seconds: float) -> None:
    import torch

    rng = np.random.default_rng(6)
    rendered = await rig.pipeline.chat(ChatRequest(random_chat(rng, [video_part(video(rng))])))
    (feature,) = rendered.features.values()
    expected = await rig.answer(rendered)
    wrong = {**feature.tensors, "second_per_grid_ts": from_torch(torch.tensor([seconds]))}
    with pytest.raises(FeatureRejected, match="second_per_grid_ts is"):
        await rig.answer(rebuilt(rendered, replace(feature, tensors=wrong)))
    assert await rig.answer(rendered) == expected


def with_more_embeddings(feature: Feature) -> Feature:
    return replace(feature, layout=Layout((*feature.layout.token_ids, feature.layout.token_ids[0])))


def with_a_row_of_patches(feature: Feature) -> Feature:
    grid = to_torch(feature.tensors["image_grid_thw"])
    row = grid.new_tensor([[1, 1, int(grid.prod())]])
    return replace(feature, tensors={**feature.tensors, "image_grid_thw": from_torch(row)})


@pytest.mark.parametrize(
    ("change", "message"), [(with_more_embeddings, "embeddings"), (with_a_row_of_patches, "does not tile")]
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
