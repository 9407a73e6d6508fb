"""Features from media through real HF processors, without an engine."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from semel.core import Media, Target
from semel.errors import ConfigError, InvalidRequest, MediaDegenerate, MediaUndecodable
from semel.processing import FAMILIES, Description, Family, HfProcessor, family_of, from_torch, to_torch
from semel.processing.processor import ProcessorKind, choose_processor, load_processor
from tests.processing.test_pool import picture

Folder = Callable[[str], Path]
UINT8 = Target("float32", "engine")


@pytest.fixture(scope="module")
def qwen(tiny: Folder) -> HfProcessor:
    return HfProcessor.load(tiny("qwen2-vl"), UINT8)


def test_the_layout_is_what_the_processor_replaces_its_placeholder_by(qwen: HfProcessor) -> None:
    feature = qwen.process(picture(140, 84))
    pad = qwen.processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert feature.layout.token_ids == (pad,) * (140 // 28 * 84 // 28)
    assert feature.layout.mask is None


def test_an_engine_that_normalises_gets_bytes_and_another_gets_floats_of_its_dtype(tiny: Folder) -> None:
    def pixels(target: Target) -> str:
        return HfProcessor.load(tiny("qwen2-vl"), target).process(picture(56, 56)).tensors["pixel_values"].dtype

    assert pixels(UINT8) == "uint8"
    assert pixels(Target("float32", "processor")) == "float32"
    assert pixels(Target("bfloat16", "processor")) == "bfloat16"


def test_options_of_the_request_change_the_feature(qwen: HfProcessor) -> None:
    limited = qwen.process(picture(560, 560), {"size": {"shortest_edge": 3_136, "longest_edge": 28 * 28 * 16}})
    assert limited.layout.num_embeds <= 16 < qwen.process(picture(560, 560)).layout.num_embeds


@pytest.mark.parametrize(
    "options",
    [
        {"videos": "http://127.0.0.1/x.mp4"},
        {"device": "meta"},
        {"padding": "max_length"},
        {"images_kwargs": {"size": 1}},
        {"text": "x"},
        {"size": {"shortest_edge": 10**12}},
        {"size": "large"},
        {"max_pixels": float("nan")},
    ],
)
def test_an_option_that_reaches_past_the_picture_is_refused_S1_S15(
    qwen: HfProcessor, options: dict[str, object]
) -> None:
    with pytest.raises(InvalidRequest, match="mm_processor_kwargs"):
        qwen.process(picture(56, 56), options)


def test_an_item_of_a_modality_that_the_model_lacks_is_the_client_s_fault(qwen: HfProcessor) -> None:
    with pytest.raises(InvalidRequest, match="takes no audio; it takes image, video"):
        qwen.process(Media("audio", b"RIFF"))


def test_a_clip_too_short_to_be_heard_is_refused_S8(tiny: Folder) -> None:
    import wave

    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, 16_000, 200, "NONE", ""))
        file.writeframes(bytes(400))
    processor = HfProcessor.load(tiny("qwen2-audio"), Target("float32"))
    with pytest.raises(MediaDegenerate, match="too short"):
        processor.process(Media("audio", buffer.getvalue()))


def test_an_image_that_the_processor_refuses_is_the_client_s_fault_in_our_words_S7(qwen: HfProcessor) -> None:
    with pytest.raises(MediaUndecodable, match="check its proportions"):
        qwen.process(picture(2, 2_000))


def test_the_fingerprint_is_the_same_in_every_load_and_from_every_place(tiny: Folder, tmp_path: Path) -> None:
    folder = tiny("qwen2-vl")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.symlink_to(folder)
    prints = {HfProcessor.load(place, UINT8).fingerprint for place in (folder, folder, elsewhere)}
    assert len(prints) == 1


@pytest.mark.parametrize(
    "target",
    [
        Target("bfloat16", "engine"),
        Target("float32", "processor"),
        Target("float32", "engine", {"min_pixels": 4_000}),
    ],
)
def test_the_fingerprint_changes_with_everything_that_changes_a_feature(tiny: Folder, target: Target) -> None:
    folder = tiny("qwen2-vl")
    assert HfProcessor.load(folder, target).fingerprint != HfProcessor.load(folder, UINT8).fingerprint


def test_the_fingerprint_changes_with_the_processor_s_config(tiny: Folder, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    changed.mkdir()
    for file in tiny("qwen2-vl").iterdir():
        text = file.read_bytes()
        (changed / file.name).write_bytes(text.replace(b"0.48145466", b"0.48145467"))
    assert HfProcessor.load(changed, UINT8).fingerprint != HfProcessor.load(tiny("qwen2-vl"), UINT8).fingerprint


def test_a_mask_marks_the_token_that_a_replacement_repeats_most() -> None:
    layout = Family().layout({}, [9, 5, 5, 5, 7, 5, 5, 8])
    assert layout.mask is not None
    assert list(layout.mask.bits) == [0, 1, 1, 1, 0, 1, 1, 0]


def test_a_llava_with_the_tower_of_pixtral_is_none_and_gets_vllm_s_processor() -> None:
    towers = {"clip_vision_model": "hf", "siglip_vision_model": "hf", "pixtral": "vllm"}
    for tower, kind in towers.items():
        config = {"model_type": "llava", "vision_config": {"model_type": tower}}
        assert choose_processor("auto", config) == kind
        assert (type(family_of(config)) is Family) == (kind == "vllm")


def test_auto_is_the_hf_processor_for_the_families_that_semel_knows_and_vllm_s_for_others(tiny: Folder) -> None:
    assert isinstance(load_processor("auto", tiny("qwen2-vl"), UINT8), HfProcessor)
    assert {choose_processor("auto", {"model_type": name}) for name in FAMILIES} == {"hf"}
    assert choose_processor("auto", {"model_type": "something-new"}) == choose_processor("auto", {}) == "vllm"
    for kind in get_args(ProcessorKind):
        if kind != "auto":
            assert choose_processor(kind, {"model_type": "qwen2_vl"}) == kind


@pytest.mark.parametrize("family", ["qwen2-vl", "qwen2-audio", "whisper"])
def test_a_description_writes_items_into_prompts_as_its_processor_does(tiny: Folder, family: str) -> None:
    processor = HfProcessor.load(tiny(family), Target("float32"))
    described = Description.of(processor)
    for modality in processor.placeholders:
        for index in (1, 2, 1_000):
            assert described.insertion(modality, index) == processor.insertion(modality, index)
    with pytest.raises(ConfigError, match="takes no"):
        described.insertion("image" if "audio" in processor.modalities else "audio", 1)


def test_a_grid_that_contradicts_its_patches_is_a_fault_S9(qwen: HfProcessor) -> None:
    feature = qwen.process(picture(140, 84))
    assert qwen.family.check(qwen.config, feature) is None
    pixels = from_torch(to_torch(feature.tensors["pixel_values"])[1:])
    fewer = replace(feature, tensors={**feature.tensors, "pixel_values": pixels})
    assert "patches" in str(qwen.family.check(qwen.config, fewer))
