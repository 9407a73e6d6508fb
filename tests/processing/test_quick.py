"""The shortcuts of `HfProcessor`, held to the HF processor without any: the same features, bit for bit."""

from __future__ import annotations

import io
import wave
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from semel.core import Feature, Media, Target
from semel.errors import SemelError
from semel.processing import FAMILIES, Family, HfProcessor
from semel.processing.families import Qwen2VL
from semel.processing.hf import RunTokenizer
from tests.effort import examples

Folder = Callable[[str], Path]

BYTES = Target("float32", "engine")
FLOATS = Target("float32")
HALVES = Target("bfloat16")
IMAGES = [
    ("qwen2-vl", BYTES),
    ("qwen2-vl", HALVES),
    ("qwen2.5-vl", BYTES),
    ("llava", HALVES),
    ("gemma3", FLOATS),
    ("idefics3", FLOATS),
]
ordinary = settings(
    max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def without_shortcuts(quick: HfProcessor, folder: Path) -> HfProcessor:
    """The control: the folder's HF processor as transformers loads it, called as its documentation says."""
    from transformers import AutoProcessor

    plain = cast("Family", type("Plain", (type(quick.family),), {"quick": False})())
    return replace(quick, processor=AutoProcessor.from_pretrained(folder, local_files_only=True), family=plain)


@pytest.fixture(scope="module")
def pairs(tiny: Folder) -> Callable[[str, Target], tuple[HfProcessor, HfProcessor]]:
    """A family's processor with shortcuts and without, each loaded once."""
    loaded: dict[tuple[str, Target], tuple[HfProcessor, HfProcessor]] = {}

    def pair(family: str, target: Target) -> tuple[HfProcessor, HfProcessor]:
        if (family, target) not in loaded:
            quick = HfProcessor.load(tiny(family), target)
            loaded[family, target] = quick, without_shortcuts(quick, tiny(family))
        return loaded[family, target]

    return pair


Pairs = Callable[[str, Target], tuple[HfProcessor, HfProcessor]]


def outcome(processor: HfProcessor, media: Media, options: dict[str, object] | None = None) -> object:
    """A feature's whole content, or the refusal."""
    try:
        feature: Feature = processor.process(media, options)
    except SemelError as error:
        return type(error), str(error)
    tensors = {name: (tensor.dtype, tensor.shape, bytes(tensor.data)) for name, tensor in feature.tensors.items()}
    return feature.modality, tensors, feature.layout


def image(width: int, height: int, mode: str, format_: str) -> Media:
    noise = np.random.default_rng(width * height).integers(0, 256, (height // 7 + 1, width // 7 + 1, 3), np.uint8)
    picture = Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).convert(mode)
    buffer = io.BytesIO()
    picture.save(buffer, format_)
    return Media("image", buffer.getvalue())


def clip(samples: int) -> Media:
    noise = np.random.default_rng(samples).normal(0, 6_000, samples).clip(-32_768, 32_767).astype("<i2")
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, 16_000, samples, "NONE", ""))
        file.writeframes(noise.tobytes())
    return Media("audio", buffer.getvalue())


@pytest.mark.parametrize(("family", "target"), IMAGES)
@ordinary
@given(
    width=st.integers(2, 500),
    height=st.integers(2, 500),
    kind=st.sampled_from([("RGB", "JPEG"), ("RGB", "PNG"), ("L", "JPEG"), ("RGBA", "PNG"), ("P", "PNG")]),
)
def test_images_of_any_size_and_kind_are_as_without_shortcuts(
    pairs: Pairs, family: str, target: Target, width: int, height: int, kind: tuple[str, str]
) -> None:
    quick, plain = pairs(family, target)
    media = image(width, height, *kind)
    assert outcome(quick, media) == outcome(plain, media)


@ordinary
@given(
    options=st.fixed_dictionaries(
        {},
        optional={
            "do_resize": st.booleans(),
            "size": st.fixed_dictionaries(
                {"shortest_edge": st.integers(28 * 28, 28 * 280), "longest_edge": st.integers(28 * 28, 28 * 2_800)}
            ),
        },
    ),
    sides=st.tuples(st.integers(1, 8), st.integers(1, 8)),
)
def test_options_of_requests_act_as_without_shortcuts(
    pairs: Pairs, options: dict[str, object], sides: tuple[int, int]
) -> None:
    quick, plain = pairs("qwen2-vl", BYTES)
    media = image(28 * sides[0], 14 * sides[1], "RGB", "PNG")
    assert outcome(quick, media, options) == outcome(plain, media, options)


@pytest.mark.parametrize(("family", "target"), [("qwen2-audio", FLOATS), ("qwen2-audio", HALVES), ("whisper", HALVES)])
@pytest.mark.parametrize("samples", [1, 401, 16_000, 16_001, 79_999, 31 * 16_000])
def test_clips_of_any_length_are_as_without_shortcuts(pairs: Pairs, family: str, target: Target, samples: int) -> None:
    quick, plain = pairs(family, target)
    assert outcome(quick, clip(samples)) == outcome(plain, clip(samples))


def test_the_fingerprint_is_that_of_the_processor_without_shortcuts(tiny: Folder) -> None:
    from semel.processing.fingerprint import fingerprint

    folder = tiny("qwen2-vl")
    quick = HfProcessor.load(folder, BYTES)
    plain = without_shortcuts(quick, folder)
    assert quick.fingerprint == fingerprint(plain.processor, plain.config, BYTES, folder / "tokenizer.json")


def test_a_family_that_semel_does_not_know_gets_no_shortcuts(tiny: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semel.processing.hf.family_of", lambda _: Family())
    unknown = HfProcessor.load(tiny("llava"), FLOATS)
    assert not isinstance(unknown.processor.tokenizer, RunTokenizer)
    assert unknown.process(image(60, 40, "RGB", "PNG")).layout.num_embeds
    assert {name for name, family in FAMILIES.items() if not family.separates_text} == {
        "whisper"
    }  # it has no text to keep apart


def test_another_way_of_cutting_patches_is_left_alone(pairs: Pairs, tiny: Folder) -> None:
    from transformers import AutoProcessor

    def of_another_version(images: Any, patch_size: int) -> None:
        del images, patch_size

    processor = AutoProcessor.from_pretrained(tiny("qwen2-vl"), local_files_only=True)
    processor.image_processor.patchify = of_another_version
    Qwen2VL().quicken(processor)
    assert processor.image_processor.patchify is of_another_version
    assert pairs("qwen2-vl", BYTES)[0].processor.image_processor.patchify is not of_another_version


@pytest.mark.parametrize("family", ["qwen2-vl", "qwen2.5-vl", "llava", "qwen2-audio", "gemma3", "idefics3"])
@ordinary
@given(count=st.integers(0, 5_000), before=st.sampled_from(["", " ", "a", "\n\n"]), behind=st.sampled_from(["", "b"]))
def test_a_run_of_placeholders_has_the_ids_that_the_tokenizer_gives(
    pairs: Pairs, family: str, count: int, before: str, behind: str
) -> None:
    processor = pairs(family, FLOATS)[0]
    tokenizer = processor.processor.tokenizer
    assert isinstance(tokenizer, RunTokenizer)
    for token in processor.placeholders.values():
        text = [f"{before}{token * count}{behind}"]
        arguments = {"add_special_tokens": False, "padding": False}
        assert tokenizer(text, **arguments)["input_ids"] == tokenizer.tokenizer(text, **arguments)["input_ids"]


def test_a_run_longer_than_the_tokenizer_takes_is_cut_by_the_tokenizer(tiny: Folder) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny("qwen2-vl"), model_max_length=8)
    counting = RunTokenizer(tokenizer, ["<|image_pad|>"])
    for count in (7, 8, 9):
        text = ["<|image_pad|>" * count]
        assert len(counting(text, truncation=True)["input_ids"][0]) == min(count, 8)
