"""Whisper on the real engine: an encoder-decoder's parity with vLLM's own rendering, malformed features."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from semel.core import Layout, Media, Placeholder, Prompt, Timeline
from semel.errors import FeatureMissing, FeatureRejected
from semel.media import DecodeLimits, decode_audio
from semel.render import Rendered
from tests.engine.parity import Answer, Rig, clip, distinct, running

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

STARTS = ("<|startoftranscript|><|en|><|transcribe|><|notimestamps|>", "<|startoftranscript|><|de|><|translate|>")


@pytest.fixture(scope="module")
async def rig(tiny: Callable[[str], Path]) -> AsyncIterator[Rig]:
    async with running(tiny("whisper"), max_model_len=448) as started:
        yield started


async def bare(rig: Rig, data: bytes, start: str) -> Answer:
    """vLLM's own rendering, from samples that its own loader reads."""
    from vllm.inputs import ExplicitEncoderDecoderPrompt, TextPrompt
    from vllm.multimodal.media.audio import load_audio

    samples, rate = load_audio(io.BytesIO(data), sr=None)
    encoder = TextPrompt(prompt="", multi_modal_data={"audio": (samples, rate)})
    return await rig.bare_prompt(
        ExplicitEncoderDecoderPrompt(encoder_prompt=encoder, decoder_prompt=TextPrompt(prompt=start))
    )


async def test_ten_random_clips_are_transcribed_as_by_vllm_itself(either: Rig) -> None:
    rng = np.random.default_rng(0)
    clips = [(clip(rng), STARTS[index % 2]) for index in range(10)]
    await either.engine.reset()
    expected = [await bare(either, data, start) for data, start in clips]
    await either.engine.reset()
    answers = [
        await either.answer(await either.pipeline.transcription(Media("audio", data), start)) for data, start in clips
    ]
    assert answers == expected
    assert distinct(answers) >= 0.95


async def test_vllm_keeps_no_clips_for_an_encoder_decoder_so_injecting_one_does_nothing_D6(rig: Rig) -> None:
    rendered = await rig.pipeline.transcription(Media("audio", clip(np.random.default_rng(3))), STARTS[0])
    expected = await rig.answer(rendered)
    ((identity, feature),) = rendered.features.items()
    assert rig.engine.contract.cache_bytes == 0
    assert not await rig.engine.inject(identity, feature)
    assert not rig.engine.holds(identity)
    with pytest.raises(FeatureMissing):
        await rig.answer(replace(rendered, features={}))
    with pytest.raises(FeatureRejected, match="the encoder has 1500 positions"):
        await rig.engine.inject(identity, replace(feature, layout=Layout((0,) * 1_499)))
    await rig.engine.reset()
    assert await rig.answer(rendered) == expected


async def test_an_encoder_prompt_of_another_length_is_refused_and_the_engine_lives_on_S9(rig: Rig) -> None:
    rng = np.random.default_rng(1)
    rendered = await rig.pipeline.transcription(Media("audio", clip(rng)), STARTS[0])
    expected = await rig.answer(rendered)
    (identity, feature), *_ = rendered.features.items()
    short = replace(feature, layout=Layout((0,) * 1_499))
    prompt = Prompt(
        rendered.prompt.token_ids,
        Timeline.encoder([Placeholder(0, 1_499)]),
        rendered.prompt.items,
        encoder_token_ids=short.layout.token_ids,
    )
    with pytest.raises(FeatureRejected, match="the encoder has 1500 positions"):
        await rig.answer(Rendered(prompt, {identity: short}))
    assert await rig.answer(rendered) == expected


async def test_a_prompt_without_its_encoder_s_side_is_refused_S9(rig: Rig) -> None:
    text = Rendered(Prompt([1, 2], Timeline.decoder([]), ()), {})
    with pytest.raises(FeatureRejected, match="not one for an encoder-decoder model"):
        await rig.answer(text)


def test_a_clip_decodes_to_the_samples_that_vllm_reads() -> None:
    from vllm.multimodal.media.audio import load_audio

    data = clip(np.random.default_rng(2))
    samples, _ = load_audio(io.BytesIO(data), sr=None)
    assert np.array_equal(decode_audio(data, DecodeLimits(), sampling_rate=16_000), samples)
