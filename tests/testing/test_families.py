"""What families do with the tiny models, without an engine."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from semel.core import Layout, Media, Target
from semel.errors import ConfigError, InvalidRequest
from semel.processing import HfProcessor, from_torch, to_torch
from semel.processing.families import Gemma3

Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def gemma(tiny: Folder) -> HfProcessor:
    return replace(HfProcessor.load(tiny("gemma3"), Target("float32")), family=Gemma3())


def picture(width: int, height: int, seed: int = 0) -> Media:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG")
    return Media("image", buffer.getvalue(), "image/png")


@pytest.mark.parametrize(
    ("family", "tokens", "embeds"), [("idefics3", 13 * 6 + 6, 13 * 4), ("llava", 36, 36), ("qwen2.5-vl", 8, 8)]
)
def test_a_feature_has_a_mask_where_marks_stand_among_its_embeddings_A1(
    tiny: Folder, family: str, tokens: int, embeds: int
) -> None:
    processor = HfProcessor.load(tiny(family), Target("float32"))
    feature = processor.process(picture(56, 112) if family == "qwen2.5-vl" else picture(90, 120))
    assert (len(feature.layout), feature.layout.num_embeds) == (tokens, embeds)
    assert (feature.layout.mask is None) == (tokens == embeds)
    assert processor.family.check(processor.config, feature) is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("level", [0, 127, 128, 255])
def test_no_image_of_one_colour_gives_idefics3_a_tile_that_it_leaves_out_S8(
    tiny: Folder, level: int, dtype: str
) -> None:
    """Normalised, black is -1, and the middle lies between two levels. vLLM's Idefics3 takes no other pixels."""
    buffer = io.BytesIO()
    Image.new("RGB", (90, 120), (level,) * 3).save(buffer, "PNG")
    processor = HfProcessor.load(tiny("idefics3"), Target(dtype))
    assert processor.family.check(processor.config, processor.process(Media("image", buffer.getvalue()))) is None


def test_a_layout_of_gemma3_reaches_from_mark_to_mark_A1(gemma: HfProcessor) -> None:
    feature = gemma.process(picture(90, 120))
    start, image, end = (gemma.config[f"{name}_token_index"] for name in ("boi", "image", "eoi"))
    assert feature.layout.token_ids == (start, *[image] * 16, end)
    assert feature.layout.mask is not None
    assert list(feature.layout.mask.bits) == [0, *[1] * 16, 0]
    assert gemma.family.check(gemma.config, feature) is None
    assert gemma.family.placeholder_text("image", "<start_of_image>") == "\n\n<start_of_image>\n\n"


def test_gemma3_takes_no_crops(gemma: HfProcessor) -> None:
    with pytest.raises(InvalidRequest, match="do_pan_and_scan: not available"):
        gemma.process(picture(90, 120), {"do_pan_and_scan": True})
    with pytest.raises(ConfigError, match="without do_pan_and_scan"):
        gemma.family.layout(gemma.config, [5, gemma.config["boi_token_index"], 7])


def test_images_that_gemma3_does_not_count_right_are_a_fault_S9(gemma: HfProcessor) -> None:
    feature = gemma.process(picture(90, 120))
    twice = {**feature.tensors, "num_patches": from_torch(to_torch(feature.tensors["num_patches"]) * 2)}
    assert "num_patches" in str(gemma.family.check(gemma.config, replace(feature, tensors=twice)))
    fewer = replace(feature, layout=Layout(feature.layout.token_ids))
    assert "16 embeddings" in str(gemma.family.check(gemma.config, fewer))


def test_pixels_of_llava_that_give_other_embeddings_than_the_layout_are_a_fault_S9(tiny: Folder) -> None:
    processor = HfProcessor.load(tiny("llava"), Target("float32"))
    feature = processor.process(picture(90, 120))
    more = replace(feature, layout=Layout((*feature.layout.token_ids, 5)))
    assert "36 embeddings" in str(processor.family.check(processor.config, more))
