"""The self-test of a worker: each planted difference is found, and named in words that help."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from semel.core import Contract, Feature, Layout, Media, Modality, Target
from semel.engine.vllm.model.model import VllmModel
from semel.engine.vllm.model.processor import VllmProcessor
from semel.engine.vllm.model.self_test import Assemble, SelfTest, assembling
from semel.errors import ConfigError
from semel.processing.hf import HfProcessor
from tests.engine.families import Change, one_token_more, with_a_mark_as_embedding, with_layout, with_tensor

Folder = Callable[[str], Path]
TARGET = Target("float32")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Planted:
    """A processor that is wrong in one way."""

    real: Any
    change: Change = lambda feature: feature
    options: Mapping[str, object] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def process(self, media: Media, options: Mapping[str, object] | None = None) -> Feature:
        return self.change(self.real.process(media, {**(options or {}), **self.options}))


@dataclass(frozen=True)
class Announcing(Planted):
    """A processor that announces a token more from the header than it makes, of images that are not square."""

    def lay_out_header(self, media: Media, options: Mapping[str, object] | None = None) -> Layout | None:
        feature = self.process(media, options)
        height, width = feature.origin.shape if feature.origin else (0, 0)
        return Layout((*feature.layout.token_ids, 5)) if height != width else feature.layout


@pytest.fixture(scope="module")
def bench(tiny: Folder) -> Callable[[str], SelfTest]:
    """The self-test of a family, as a worker runs it."""
    made: dict[str, SelfTest] = {}

    def of(family: str) -> SelfTest:
        if family not in made:
            folder = tiny(family)
            engine = VllmProcessor.load(folder, TARGET).processor
            model = VllmModel(engine.info.ctx.model_config, engine)
            for modality in model._limits:
                model._probe(modality)
            processor = HfProcessor.load(folder, TARGET)
            fields = {modality: model.fields(modality) for modality in model.max_items}
            contract = Contract(
                family, processor.fingerprint, TARGET, fields, dict.fromkeys(fields, 4), 1 << 20, 1 << 20
            )
            made[family] = SelfTest(processor, engine, model, contract)
        return made[family]

    return of


def own_assemble(test: SelfTest) -> Assemble:
    return assembling(test.processor, test.engine.info.get_tokenizer())


def of_large_ones(change: Change) -> Change:
    return lambda feature: change(feature) if feature.origin and max(feature.origin.shape) > 1_000 else feature


DIFFERENCES: Mapping[str, tuple[str, Change, str]] = {
    "a dimension": ("llava", with_tensor("pixel_values", lambda a: a[:, :, 1:]), r"pixel_values is .*\[3, 84, 83\]"),
    "a dimension more": ("llava", with_tensor("pixel_values", lambda a: a[None]), r"\[1, 3, 84, 84\]"),
    "a dtype": ("llava", with_tensor("pixel_values", lambda a: a.astype(np.float64)), r"Tensor\(float64"),
    "one value of a hundred thousand": (
        "llava",
        with_tensor("pixel_values", lambda a: np.where(np.arange(a.size).reshape(a.shape) == 7, a + 1, a)),
        "pixel_values of an image of 56×56 is .* but has other values",
    ),
    "colours swapped, of large images only": (
        "llava",
        of_large_ones(with_tensor("pixel_values", lambda a: a[::-1])),
        "pixel_values of an image of 1024×768 is .* but has other values",
    ),
    "a field that is lost": (
        "qwen2-vl",
        lambda feature: replace(feature, tensors={k: v for k, v in feature.tensors.items() if "grid" not in k}),
        "has the tensors",
    ),
    "a grid turned round": (
        "qwen2-vl",
        with_tensor("image_grid_thw", lambda a: a[[0, 2, 1]]),
        "image_grid_thw of an image",
    ),
    "one token more": (
        "llava",
        with_layout(one_token_more),
        "pixel_values gives 36 embeddings",
    ),
    "another token": ("qwen2-vl", with_layout(lambda ids: Layout((5,) * len(ids))), "its tensors make"),
    "a mask": ("idefics3", with_a_mark_as_embedding, "embeddings"),
    "an attention mask": ("idefics3", with_tensor("pixel_attention_mask", lambda a: a * 0), "pixel_attention_mask"),
    "a number that no encoder can take": (
        "llava",
        with_tensor("pixel_values", lambda a: a * 0 + 3e38),
        "beyond ±65,504",
    ),
    "a number that is not one": (
        "llava",
        with_tensor("pixel_values", lambda a: a * np.nan),
        "values that are no numbers",
    ),
}


@pytest.mark.parametrize("planted", DIFFERENCES)
def test_a_planted_difference_is_found_and_named(bench: Callable[[str], SelfTest], planted: str) -> None:
    family, change, words = DIFFERENCES[planted]
    test = bench(family)
    verdict = replace(test, processor=Planted(test.processor, change)).run()
    assert set(verdict.faults) >= {"image"}
    assert re.search(words, verdict.faults["image"]), verdict.faults["image"]


@pytest.mark.parametrize("family", ["gemma3", "idefics3", "llava", "qwen2-audio", "qwen2-vl", "whisper"])
def test_without_one_every_modality_is_served(bench: Callable[[str], SelfTest], family: str) -> None:
    test = bench(family)
    verdict = test.run()
    assert verdict.faults == {}
    assert verdict.features.keys() == test.contract.fields.keys()
    assert verdict.admitted(test.contract) == test.contract


def test_a_header_that_announces_another_layout_is_found(bench: Callable[[str], SelfTest]) -> None:
    test = bench("qwen2-vl")
    fault = replace(test, processor=Announcing(test.processor)).run().faults["image"]
    assert re.search(r"an image of 640×480 has .*, its header tells ", fault), fault


def test_an_option_that_is_lost_is_found(bench: Callable[[str], SelfTest]) -> None:
    test = bench("qwen2-vl")
    lost = Planted(test.processor, options={"max_pixels": 28 * 28 * 16})
    assert "of an image of 640×480" in replace(test, processor=lost).run().faults["image"]


def test_an_item_that_depends_on_its_company_is_found(bench: Callable[[str], SelfTest]) -> None:
    test = bench("llava")

    def shorter_in_company(assemble: Assemble) -> Assemble:
        def changed(text: str, items: Any, layouts: Any) -> Any:
            cut = [Layout(one.token_ids[1:]) for one in layouts] if len(layouts) > 1 else layouts
            return assemble(text, items, cut)

        return changed

    verdict = replace(test, assemble=shorter_in_company(own_assemble(test))).run()
    assert "a prompt with 2 of the modality image has" in verdict.faults["image"]


def test_text_around_an_item_that_is_tokenised_otherwise_is_found(bench: Callable[[str], SelfTest]) -> None:
    test = bench("gemma3")

    def plain(text: str, items: Any, layouts: Any) -> Any:
        return own_assemble(test)(text.replace("see ", "see  "), items, layouts)

    assert "a prompt with 1" in replace(test, assemble=plain).run().faults["image"]


def test_a_difference_switches_its_modality_off_and_no_other(
    bench: Callable[[str], SelfTest], caplog: pytest.LogCaptureFixture
) -> None:
    test = bench("qwen2-vl")
    wrong = Planted(test.processor, with_tensor("video_grid_thw", lambda a: a + 1))
    verdict = replace(test, processor=wrong).run()
    assert verdict.faults.keys() == {"video"}
    contract = verdict.admitted(test.contract)
    assert contract.fields.keys() == contract.max_items.keys() == {"image"}
    assert "this worker takes no video, because semel would not serve it as vLLM does: a video of" in caplog.text


def test_a_model_of_which_nothing_is_left_is_refused_with_the_difference(bench: Callable[[str], SelfTest]) -> None:
    test = bench("llava")
    verdict = replace(test, processor=Planted(test.processor, with_tensor("pixel_values", lambda a: a + 1))).run()
    with pytest.raises(ConfigError, match="would not serve llava as vLLM does: pixel_values of an image of 56×56"):
        verdict.admitted(test.contract)


def test_a_foreign_error_is_a_fault_of_that_modality(bench: Callable[[str], SelfTest]) -> None:
    def fail(_: Feature) -> Feature:
        raise RuntimeError("boom")

    test = bench("llava")
    faults: Mapping[Modality, str] = replace(test, processor=Planted(test.processor, fail)).run().faults
    assert "its self-test failed" in faults["image"]
