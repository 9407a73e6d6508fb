"""Idefics3 on the real engine, a family with embedding masks: renderings and answers as by vLLM itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from semel.core import Feature, Layout, Mask
from semel.engine.vllm.compat import encoder_arguments
from semel.errors import FeatureRejected
from semel.processing import from_torch, to_torch
from semel.render import ChatRequest
from tests.engine.parity import Rig, compare, distinct, image_part, picture, random_chat, running
from tests.engine.rendering import compare_renderings, rebuilt

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
async def rig(tiny: Callable[[str], Path]) -> AsyncIterator[Rig]:
    """semel's encoder cache and planning inside, and steps so small that one often ends amid an item."""
    arguments = {
        "max_model_len": 4_096,
        "max_num_batched_tokens": 96,
        "max_num_seqs": 8,
        "limit_mm_per_prompt": {"image": 4},
    }
    async with running(tiny("idefics3"), **arguments, **encoder_arguments(with_scheduler=True)) as started:
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


async def test_masked_items_are_answered_as_by_transformers(
    rig: Rig, tiny: Callable[[str], Path], chats: list[list[dict[str, Any]]]
) -> None:
    """Both answers of a comparison pass through semel's encoder cache; this reference knows neither it nor vLLM."""
    import torch
    from transformers import Idefics3ForConditionalGeneration

    model = Idefics3ForConditionalGeneration.from_pretrained(tiny("idefics3")).eval()
    for chat in chats[1:8]:
        rendered = await rig.pipeline.chat(ChatRequest(chat))
        items = [rendered.features[item.digest] for item in rendered.prompt.items]
        tensors = {
            name: torch.cat([to_torch(feature.tensors[name]) for feature in items])[None]
            for name in ("pixel_values", "pixel_attention_mask")
            if items
        }
        ids = torch.tensor([list(rendered.prompt.token_ids)])
        tokens = model.generate(input_ids=ids, **tensors, max_new_tokens=12, min_new_tokens=12, do_sample=False)
        assert tuple(tokens[0, ids.shape[1] :].tolist()) == (await rig.answer(rendered)).token_ids


async def test_equal_images_of_a_prompt_share_their_embeddings_B1(rig: Rig) -> None:
    rng = np.random.default_rng(2)
    part, other = image_part(picture(rng)), image_part(picture(rng))
    await compare(rig, [random_chat(rng, [part, other, part]), random_chat(rng, [part, part, part, other])])


def with_tensor(name: str, change: Callable[[Any], Any]) -> Callable[[Feature], Feature]:
    def changed(feature: Feature) -> Feature:
        value = from_torch(change(to_torch(feature.tensors[name]).clone()).contiguous())
        return replace(feature, tensors={**feature.tensors, name: value})

    return changed


def first_tile_zero(pixels: Any) -> Any:
    pixels[0] = 0
    return pixels


def a_hole(mask: Any) -> Any:
    mask[0, 3, 3] = 0
    return mask


def without_the_top(mask: Any) -> Any:
    mask[:, :20] = 0
    return mask


def with_a_mark_as_embedding(feature: Feature) -> Feature:
    assert feature.layout.mask is not None
    return replace(feature, layout=Layout(feature.layout.token_ids, Mask([1, *feature.layout.mask.bits[1:]])))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_tensor("num_patches", lambda n: n + 1), "num_patches is"),
        (with_tensor("pixel_values", lambda pixels: pixels[1:]), "num_patches is"),
        (with_tensor("pixel_values", first_tile_zero), "nothing but zeros"),
        (with_tensor("pixel_attention_mask", a_hole), "one rectangle"),
        (with_tensor("pixel_attention_mask", lambda mask: mask * 0), "one rectangle"),
        (with_tensor("pixel_attention_mask", without_the_top), "one rectangle"),
        (with_a_mark_as_embedding, "pixel_values gives"),
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
