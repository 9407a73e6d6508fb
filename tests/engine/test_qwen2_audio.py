"""Qwen2-Audio on the real engine: parity with vLLM's own rendering, malformed features."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from semel.core import Tensor
from semel.errors import FeatureRejected
from semel.processing import to_torch
from semel.render import ChatRequest
from tests.engine.parity import Rig, audio_part, clip, compare, distinct, random_chat, running

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
async def rig(tiny: Callable[[str], Path]) -> AsyncIterator[Rig]:
    async with running(tiny("qwen2-audio"), max_model_len=4_096, limit_mm_per_prompt={"audio": 3}) as started:
        yield started


async def test_twenty_random_chats_are_answered_as_by_vllm_itself(either: Rig) -> None:
    rng = np.random.default_rng(0)
    chats = [random_chat(rng, [audio_part(clip(rng)) for _ in range(index % 4)]) for index in range(20)]
    answers = await compare(either, chats)
    assert distinct(answers) >= 0.95


@pytest.mark.parametrize(
    ("ones", "message"), [(slice(0, 40), "feature_attention_mask gives"), (slice(10, 200), "not a run of ones")]
)
async def test_a_mask_that_contradicts_the_layout_is_refused_and_the_engine_lives_on_S9(
    rig: Rig, ones: slice, message: str
) -> None:
    rng = np.random.default_rng(1)
    rendered = await rig.pipeline.chat(ChatRequest(random_chat(rng, [audio_part(clip(rng))])))
    (identity, feature), *_ = rendered.features.items()
    mask = np.zeros_like(to_torch(feature.tensors["feature_attention_mask"]).numpy())
    mask[0, ones] = 1
    wrong = Tensor(str(mask.dtype), mask.shape, mask.data.cast("B"))
    broken = replace(feature, tensors={**feature.tensors, "feature_attention_mask": wrong})
    expected = await rig.answer(rendered)
    with pytest.raises(FeatureRejected, match=message):
        await rig.answer(replace(rendered, features={identity: broken}))
    assert await rig.answer(rendered) == expected
