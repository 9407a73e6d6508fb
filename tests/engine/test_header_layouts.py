"""Layouts of images from their headers: as full processing makes them, or not used. No family has code of its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from semel.core import Layout, Media
from semel.engine.vllm.model import processor
from semel.engine.vllm.model.header_layouts import HeaderLayouts
from tests.engine.test_self_test import Folder
from tools.engine.layouts import compare_layouts, load_generic
from tools.engine.sizes import image_of

SIZES = 8
WITHOUT_HEADER = {"lfm2-vl": "vLLM reads spatial_shapes"}
FAMILIES = (
    *("cohere2-vision", "gemma4", "glm-4.1v", "internvl", "internvl-chat", "lfm2-vl", "llava-next", "llava-onevision"),
    *("mistral3", "paddleocr-vl", "paligemma", "pixtral", "qwen2.5-omni", "qwen3-vl", "qwen3-vl-moe", "qwen3.5"),
    "smolvlm",
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

Plant = Callable[[pytest.MonkeyPatch, Any], None]


@pytest.fixture(scope="module")
def loaded(tiny: Folder) -> Callable[[str], Any]:
    """The processor of a family, with nothing proven or remembered."""
    made: dict[str, Any] = {}

    def of(family: str) -> Any:
        if family not in made:
            made[family] = load_generic(family, tiny(family))
        fresh = HeaderLayouts(made[family].processor, made[family].header_layouts._part_of)
        return replace(made[family], header_layouts=fresh)

    return of


def picture(width: int, height: int) -> Media:
    return Media("image", image_of(width, height), "image/png")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_header_tells_the_layout_that_processing_makes(loaded: Callable[[str], Any], family: str) -> None:
    found = compare_layouts(loaded(family), SIZES, seed=7)
    assert not found.faults
    if (reason := WITHOUT_HEADER.get(family)) is not None:
        assert reason in found.proof
        assert found.proof.startswith("known sizes only")
        return
    assert found.proof.startswith("yes")
    assert found.equal + found.refused == found.sizes == SIZES
    assert found.equal > SIZES // 2


@pytest.mark.parametrize("family", ["qwen3-vl", "lfm2-vl"])
def test_an_image_of_a_known_size_is_not_decoded(
    loaded: Callable[[str], Any], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = loaded(family)
    assert ours.header_layouts.proof.fault is None
    smaller = {"size": {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}} if family == "qwen3-vl" else {}
    expected = [ours.process(picture(640, 481), options).layout for options in ({}, smaller)]
    assert (expected[0] != expected[1]) == (family == "qwen3-vl")
    monkeypatch.setattr(processor, "image_of", lambda *_: pytest.fail("it was decoded"))
    assert [ours.lay_out(picture(640, 481), options) for options in ({}, smaller)] == expected
    with pytest.raises(pytest.fail.Exception):  # the control: nothing tells the size of a file that is cut short
        ours.lay_out(Media("image", image_of(640, 481)[:-1]))


def test_a_layout_with_options_is_not_computed(loaded: Callable[[str], Any]) -> None:
    """Nothing was proven of them: qwen3-vl takes `size`, of which HF's count knows nothing."""
    ours = loaded("qwen3-vl")
    smaller = {"size": {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}}
    assert ours.lay_out_header(picture(640, 480), {}) is not None
    assert ours.lay_out_header(picture(640, 480), smaller) is None
    assert ours.lay_out(picture(640, 480), smaller) == ours.process(picture(640, 480), smaller).layout


def one_tile_more(monkeypatch: pytest.MonkeyPatch, hf: Any) -> None:
    of = type(hf.image_processor).get_number_of_image_patches

    def more(self: Any, height: int, width: int, options: Any) -> int:
        return int(of(self, height, width, options)) + (height > 700)

    monkeypatch.setattr(type(hf.image_processor), "get_number_of_image_patches", more)


def rounded_resize(monkeypatch: pytest.MonkeyPatch, hf: Any) -> None:
    of = type(hf.image_processor).get_number_of_image_patches

    def rounded(self: Any, height: int, width: int, options: Any) -> int:
        return int(of(self, -(-height // 32) * 32, -(-width // 32) * 32, options))

    monkeypatch.setattr(type(hf.image_processor), "get_number_of_image_patches", rounded)


@pytest.mark.parametrize(
    ("family", "plant", "words"),
    [
        ("internvl", one_tile_more, r"an image of 1024×768 would have [\d,]+ tokens, processing makes [\d,]+"),
        ("qwen3-vl", rounded_resize, r"an image of \d+×\d+ would have [\d,]+ tokens, processing makes [\d,]+"),
    ],
)
def test_a_planted_fault_is_found_at_start_and_full_processing_stays(
    loaded: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, family: str, plant: Plant, words: str
) -> None:
    ours = loaded(family)
    monkeypatch.setattr(type(ours.processor.info), "get_num_image_tokens", None)  # it would tell as well
    plant(monkeypatch, ours.hf_processor)
    proof = ours.header_layouts.proof
    assert proof.fields is None
    assert re.search(words, str(proof))
    assert ours.lay_out(picture(1000, 750)) == ours.process(picture(1000, 750)).layout


def test_layouts_that_depend_on_pixels_are_never_remembered(
    loaded: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, process = loaded("mistral3"), HeaderLayouts._process

    def looking(self: HeaderLayouts, size: tuple[int, int], *, is_flat: bool = False) -> tuple[Any, Layout]:
        item, layout = process(self, size, is_flat=is_flat)
        return item, Layout(layout.token_ids[1:]) if is_flat else layout

    monkeypatch.setattr(HeaderLayouts, "_process", looking)
    assert "two images of 640×480 have" in str(ours.header_layouts.proof)
    ours.process(picture(64, 64))
    assert ours.lay_out_header(picture(64, 64)) is None
