"""S8: items that decode and mean nothing, or that a model's processor chokes on: refused with 400, or processed.

The control is the HF processor itself, which raises its own errors at them, or makes infinities.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from semel.core import Feature, Media, Target
from semel.errors import MediaDegenerate, MediaUndecodable, RequestError
from semel.media import DecodeLimits, decode_audio, decode_image
from semel.processing import HfProcessor
from tests.security.corpus import encode_clip, encode_image, encode_video
from tests.security.messages import is_ours

Folder = Callable[[str], Path]
LIMITS = DecodeLimits()


def each(quick: str, *others: str) -> list[Any]:
    return [quick, *(pytest.param(name, marks=pytest.mark.slow) for name in others)]


@pytest.fixture(scope="module", params=each("qwen2-vl", "llava", "gemma3", "idefics3"))
def seeing(request: pytest.FixtureRequest, tiny: Folder) -> HfProcessor:
    return HfProcessor.load(tiny(request.param), Target("float32"))


@pytest.fixture(scope="module", params=each("qwen2-audio", "whisper"))
def hearing(request: pytest.FixtureRequest, tiny: Folder) -> HfProcessor:
    return HfProcessor.load(tiny(request.param), Target("float32"))


def outcome(processor: HfProcessor, media: Media) -> Feature | RequestError:
    try:
        return processor.process(media)
    except RequestError as error:
        assert error.status in (400, 413)
        assert is_ours(str(error)), str(error)
        return error


def finite(feature: Feature) -> bool:
    return all(
        bool(np.isfinite(np.frombuffer(tensor.data, np.float32)).all())
        for tensor in feature.tensors.values()
        if tensor.dtype == "float32"
    )


def picture(width: int, height: int) -> Media:
    return Media("image", encode_image(Image.new("RGB", (width, height), "red")))


@pytest.mark.parametrize("size", [(1, 1), (1, 500), (500, 1)])
def test_an_image_without_extent_is_refused_before_any_processor_S8(size: tuple[int, int]) -> None:
    """CVE-2026-22773."""
    with pytest.raises(MediaDegenerate, match="--min-image-side"):
        decode_image(picture(*size).data, LIMITS)
    assert Image.open(io.BytesIO(picture(*size).data)).convert("RGB").size == size


@pytest.mark.parametrize("size", [(2, 2), (2, 3), (2, 399), (2, 401), (3, 3_000), (5_000, 2), (27, 29)])
def test_every_shape_is_processed_or_refused_in_our_words_S8(seeing: HfProcessor, size: tuple[int, int]) -> None:
    got = outcome(seeing, picture(*size))
    assert isinstance(got, RequestError) or (got.layout.num_embeds > 0 and finite(got))


def test_a_strip_that_a_processor_refuses_is_the_client_s_fault_and_not_ours_S7_S8(tiny: Folder) -> None:
    processor = HfProcessor.load(tiny("qwen2-vl"), Target("float32"))
    strip = picture(2, 402)
    with pytest.raises(MediaUndecodable, match="check its proportions"):
        processor.process(strip)
    with pytest.raises(ValueError, match="aspect ratio"):  # foreign text, with a 500 where nobody maps it
        processor.processor.image_processor(Image.open(io.BytesIO(strip.data)))


@pytest.mark.parametrize("samples", [1, 2, 159, 160, 161, 320, 400, 401, 16_000])
def test_a_clip_shorter_than_a_window_is_processed_or_refused_S8(hearing: HfProcessor, samples: int) -> None:
    clip = encode_clip(np.full((1, samples), 0.25), "wav", "pcm_s16le")
    got = outcome(hearing, Media("audio", clip))
    assert isinstance(got, MediaDegenerate) or (isinstance(got, Feature) and got.layout.num_embeds > 0 and finite(got))


def test_a_clip_without_samples_is_refused_S8(hearing: HfProcessor) -> None:
    header = encode_clip(np.zeros((1, 160)), "wav", "pcm_s16le")
    size = header.index(b"data") + 4
    assert isinstance(outcome(hearing, Media("audio", header[:size] + bytes(4))), RequestError)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30, 1e6])
def test_samples_that_are_no_sound_are_refused_S8(value: float) -> None:
    samples = np.zeros((1, 1_600))
    samples[0, 800] = value
    with pytest.raises(MediaDegenerate, match="no numbers, or far beyond full scale"):
        decode_audio(encode_clip(samples, "wav", "pcm_f32le"), LIMITS, sampling_rate=16_000)


def test_a_spectrogram_of_what_is_refused_would_be_none_S8(hearing: HfProcessor) -> None:
    extractor: Any = hearing.processor.feature_extractor
    loud = np.full(1_600, 1e30, np.float32)
    with np.errstate(all="ignore"):
        made = np.asarray(extractor(loud, sampling_rate=16_000, return_tensors="np")["input_features"])
    assert not np.isfinite(made).all()


def test_sound_a_little_beyond_full_scale_is_sound() -> None:
    """Lossy codecs overshoot."""
    clip = encode_clip(np.full((1, 1_600), 1.5), "wav", "pcm_f32le")
    assert decode_audio(clip, LIMITS, sampling_rate=16_000).max() == 1.5


@pytest.mark.parametrize(("frames", "side"), [(1, 64), (2, 64), (3, 2), (2, 16)])
def test_a_video_of_next_to_nothing_is_processed_or_refused_S8(tiny: Folder, frames: int, side: int) -> None:
    processor = HfProcessor.load(tiny("qwen2-vl"), Target("float32"))
    film = encode_video(np.zeros((frames, side, side, 3), np.uint8))
    got = outcome(processor, Media("video", film))
    assert isinstance(got, RequestError) or got.layout.num_embeds > 0
