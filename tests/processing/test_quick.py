"""The shortcuts of `HfProcessor`, held to the HF processor without any: the same features, bit for bit."""

from __future__ import annotations

import io
import wave
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from semel.core import Feature, Layout, Media, Target, Tensor
from semel.errors import SemelError
from semel.processing import FAMILIES, Family, HfProcessor
from semel.processing.families import Qwen2VL
from semel.processing.hf import RunTokenizer
from semel.processing.patches import PatchWriter, lend_pixels
from semel.processing.pool.child import _write
from semel.processing.pool.pipe import to_made
from tests.effort import examples

Folder = Callable[[str], Path]

BYTES = Target("float32", "engine")
FLOATS = Target("float32")
HALVES = Target("bfloat16")
IMAGES = [
    ("qwen2-vl", BYTES),
    ("qwen2-vl", FLOATS),
    ("qwen2-vl", HALVES),
    ("qwen2.5-vl", BYTES),
    ("llava", HALVES),
    ("gemma3", FLOATS),
    ("idefics3", FLOATS),
]
SHARED_BYTES = 256 << 10
"""Of the memory that patches are written into: less than some images take."""

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
            quick.write_into(memoryview(bytearray(SHARED_BYTES)))
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


def test_an_image_processor_that_cuts_no_patches_is_left_alone() -> None:
    processor = SimpleNamespace(image_processor=SimpleNamespace())
    Qwen2VL().quicken(processor)
    Qwen2VL().write_into(processor, memoryview(bytearray(SHARED_BYTES)))
    assert processor == SimpleNamespace(image_processor=SimpleNamespace())


def check_patches_are_written_once(processor: HfProcessor, memory: memoryview) -> None:
    processor.write_into(memory)
    feature = processor.process(image(140, 84, "RGB", "PNG"))
    patches = feature.tensors["pixel_values"].data.tobytes()
    made = to_made(0, feature)
    start = next(start for head, start, _ in made.spans() if head.name == "pixel_values")
    assert memory[start : start + len(patches)] == patches
    assert _write(made, feature, memory).is_written
    assert memory[:24] == feature.tensors["image_grid_thw"].data
    assert memory[start : start + len(patches)] == patches


def test_patches_are_written_once_where_the_feature_is_to_lie(pairs: Pairs) -> None:
    check_patches_are_written_once(pairs("qwen2-vl", BYTES)[0], memoryview(bytearray(SHARED_BYTES)))


def test_mutant_patches_in_memory_of_their_own_are_not_where_the_feature_is_to_lie(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PatchWriter, "write_into", lambda *_: None)
    with pytest.raises(AssertionError):
        check_patches_are_written_once(pairs("qwen2-vl", BYTES)[0], memoryview(bytearray(SHARED_BYTES)))


def test_a_tensor_elsewhere_in_the_shared_memory_is_moved_before_another_is_written_over_it() -> None:
    memory = memoryview(bytearray(b"x" * 256))
    tensors = {"a": Tensor("uint8", (100,), memoryview(b"a" * 100)), "b": Tensor("uint8", (50,), memory[64:114])}
    _write(to_made(0, feature := Feature("image", tensors, Layout((7,)))), feature, memory)
    assert memory[:100] == b"a" * 100
    assert memory[128:178] == b"x" * 50


@pytest.mark.parametrize("size", [(1, 1), (3, 3), (640, 480)])
def test_pixels_that_are_lent_are_those_of_the_image_and_outlive_it(size: tuple[int, int]) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), np.uint8)
    pixels = lend_pixels(Image.fromarray(noise).copy())
    assert pixels is not None
    assert np.array_equal(pixels[..., :3].numpy(), noise)


def test_pixels_in_several_blocks_are_not_lent() -> None:
    several = Image.new("RGB", (2_100, 2_100))  # over 16 MB, unless the environment says more
    with pytest.raises(ValueError, match="contiguous"):
        several.__arrow_c_array__()
    assert lend_pixels(several) is None


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
