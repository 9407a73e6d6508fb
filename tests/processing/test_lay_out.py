"""A layout without a feature: what the processor would say, for less."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from semel.cache import LayoutCache
from semel.core import Media, Target
from semel.errors import InvalidRequest, MediaUndecodable
from semel.processing import HfProcessor

OTHERS = ["qwen2.5-vl", "llava", "idefics3", "gemma3"]
SIZES = [(28, 28), (64, 300), (300, 64), (333, 250), (511, 513)]


def picture(size: tuple[int, int], seed: int = 0, *, turned: bool = False) -> Media:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    exif = Image.Exif()
    if turned:
        exif[0x0112] = 6
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", exif=exif)
    return Media("image", file.getvalue())


@pytest.mark.parametrize("family", ["qwen2-vl", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_it_is_the_layout_of_the_feature_whoever_had_the_size_before(tiny: Callable[[str], Path], family: str) -> None:
    processor = HfProcessor.load(tiny(family), Target("float32"))
    for number, size in enumerate(SIZES):
        expected = processor.process(picture(size, number)).layout
        assert processor.lay_out(picture(size, number + 100)) == expected
        assert processor.lay_out(picture(size, number + 200)) == expected
        turned = processor.process(picture(size, number, turned=True)).layout
        assert processor.lay_out(picture(size, number + 100, turned=True)) == turned


@pytest.fixture
def processor(tiny: Callable[[str], Path]) -> HfProcessor:
    return HfProcessor.load(tiny("qwen2-vl"), Target("float32"))


def test_options_tell_images_of_one_size_apart(processor: HfProcessor) -> None:
    plain: dict[str, object] = {}
    small: dict[str, object] = {"size": {"shortest_edge": 3_136, "longest_edge": 28 * 28 * 16}}
    for options in (plain, small, plain, small):
        media = picture((640, 480))
        assert processor.lay_out(media, options) == processor.process(media, options).layout
    assert processor.lay_out(picture((640, 480)), plain) != processor.lay_out(picture((640, 480)), small)


def test_what_cannot_be_processed_is_refused_though_its_size_is_known(processor: HfProcessor) -> None:
    whole = picture((640, 480)).data
    processor.lay_out(Media("image", whole))
    with pytest.raises(MediaUndecodable):
        processor.lay_out(Media("image", whole[: len(whole) // 2]))
    with pytest.raises(InvalidRequest, match="a-wrong-name"):
        processor.lay_out(Media("image", whole), {"a-wrong-name": 1})
    with pytest.raises(InvalidRequest, match="takes no audio"):
        processor.lay_out(Media("audio", whole))


def test_the_processor_is_asked_once_for_a_size_and_old_sizes_are_forgotten(
    processor: HfProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    ask = HfProcessor._call

    def count(self: HfProcessor, modality: str, decoded: Image.Image, options: object) -> object:
        asked.append(decoded.size)
        return ask(self, modality, decoded, options)  # type: ignore[arg-type]

    monkeypatch.setattr(HfProcessor, "_call", count)
    processor = replace(processor, _layouts=LayoutCache(max_entries=2))
    for size in [(56, 56), (84, 84), (56, 56), (112, 112), (56, 56), (84, 84)]:
        processor.lay_out(picture(size))
    assert asked == [(56, 56), (84, 84), (112, 112), (84, 84)]
