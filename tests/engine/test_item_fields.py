"""vLLM's items: a feature carries one whole, and nothing but what its origin says goes in its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from semel.core import Contract, Digest, Feature, Field, Layout, Modality, Origin, Target
from semel.engine.vllm.model.fields import ItemFields
from semel.engine.vllm.model.item import make_item, make_stub, parse, to_tensors
from semel.engine.vllm.model.model import VllmModel
from semel.engine.vllm.model.processor import VllmProcessor
from semel.engine.vllm.model.self_test import _sent
from semel.errors import ConfigError, FeatureRejected
from semel.interchange.safetensors import FeatureEntry, read, write
from semel.media.decode.warmup_media import SAMPLES
from semel.processing import Family, from_torch
from semel.processing.hf import HfProcessor

Folder = Callable[[str], Path]
TARGET = Target("float32")
DIGEST = Digest(bytes(Digest.size))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def processor(tiny: Folder) -> VllmProcessor:
    return VllmProcessor.load(tiny("llava"), TARGET)


@pytest.fixture
def model(processor: VllmProcessor, monkeypatch: pytest.MonkeyPatch) -> VllmModel:
    """LLaVA as a family that semel does not know."""
    monkeypatch.setattr("semel.engine.vllm.model.model.family_of", lambda _: Family())
    made = VllmModel(processor.processor.info.ctx.model_config, processor.processor)
    made._probe("image")
    return made


@pytest.fixture
def feature(processor: VllmProcessor) -> Feature:
    return processor.process(SAMPLES["image"](0))


def test_an_item_that_was_carried_as_a_feature_is_vllm_s_own(
    processor: VllmProcessor, model: VllmModel, feature: Feature
) -> None:
    decoded = processor._decode(SAMPLES["image"](0))
    own = make_item(processor.processor, "image", parse(processor.processor, "image", decoded), {})
    built = model.build(feature)
    assert built.keys() == own.keys()
    for name, element in own.items():
        assert type(built[name].field) is type(element.field)
        assert built[name].data.equal(element.data)


def test_a_layout_that_the_origin_does_not_give_is_refused_S9(model: VllmModel, feature: Feature) -> None:
    pad = feature.layout.token_ids[0]
    for count in (len(feature.layout) - 1, len(feature.layout) + 1, 2 * len(feature.layout)):
        with pytest.raises(FeatureRejected, match="its tensors make"):
            model.build(replace(feature, layout=Layout((pad,) * count)))


def test_without_an_origin_nothing_proves_a_layout_S9(
    model: VllmModel, feature: Feature, monkeypatch: pytest.MonkeyPatch
) -> None:
    longer = replace(feature, origin=None, layout=Layout((feature.layout.token_ids[0],) * 99))
    with pytest.raises(FeatureRejected, match="does not say of what it was made"):
        model.build(longer)
    monkeypatch.setattr(VllmModel, "needs_seal", ())  # the mutant: nobody asks
    model.build(longer)


@pytest.mark.parametrize(
    "origin", [Origin(()), Origin((0, 5)), Origin((-1, 5)), Origin((5, 5, 5)), Origin((1 << 17, 1 << 18))]
)
def test_an_impossible_origin_is_refused_before_anything_is_made_of_it_S9(
    model: VllmModel, feature: Feature, origin: Origin
) -> None:
    with pytest.raises(FeatureRejected, match="medium of the shape"):
        model.build(replace(feature, origin=origin))


def test_a_stub_of_a_gigapixel_takes_no_memory() -> None:
    stub = make_stub("image", Origin((32_768, 32_768)))
    assert stub.shape == (32_768, 32_768, 3)
    assert stub.base is not None
    assert stub.base.nbytes == 1


def test_a_tensor_wider_than_all_probes_is_taken_from_the_fleet_and_refused_from_others(
    model: VllmModel, feature: Feature, caplog: pytest.LogCaptureFixture
) -> None:
    fields: dict[Modality, dict[str, Field]] = {"image": {"pixel_values": Field("float32", (3, 84, 1))}}
    contract = Contract("m", "f", TARGET, fields, {"image": 1}, 99, 99)
    model.admit(feature, contract)
    model.admit(feature, contract)
    assert caplog.text.count("is wider than all probes") == 1
    with pytest.raises(FeatureRejected, match="pixel_values is"):
        model.admit(replace(feature, origin=None), contract)


class _Element:
    def __init__(self, data: Any) -> None:
        from vllm.multimodal.inputs import MultiModalBatchedField

        self.data = data
        self.field = MultiModalBatchedField()


class TestNumbers:
    """Fields that are lists of numbers, as the times of a video's frames."""

    items: ClassVar[list[dict[str, Any]]] = [{"times": _Element([0.5, 1.5])}, {"times": _Element([1.0])}]

    def test_they_travel_as_a_tensor_and_arrive_as_a_list(self) -> None:
        fields = ItemFields.from_items(self.items)
        assert str(fields.fields["times"]) == "float64[*]"
        built = fields.build(Feature("video", to_tensors(self.items[0]), Layout((1,))))
        assert built["times"].data == [0.5, 1.5]

    def test_whole_numbers_stay_whole(self) -> None:
        item = {"counts": _Element([3, 4])}
        fields = ItemFields.from_items([item, item])
        assert fields.build(Feature("video", to_tensors(item), Layout((1,))))["counts"].data == [3, 4]

    def test_rows_of_numbers_arrive_as_rows(self) -> None:
        item = {"sizes": _Element([(640, 480)])}
        fields = ItemFields.from_items([item, item])
        assert str(fields.fields["sizes"]) == "int64[1, 2]"
        assert fields.build(Feature("image", to_tensors(item), Layout((1,))))["sizes"].data == [[640, 480]]

    @pytest.mark.parametrize("data", [[np.zeros(1)], [[1], [2, 3]], ["a"]])
    def test_what_is_neither_is_told_by_its_name(self, data: Any) -> None:
        with pytest.raises(ConfigError, match="the field slices of an item"):
            ItemFields.from_items([{"slices": _Element(data)}])


class TestTensors:
    """Fields that are several tensors, as the slices of an image of MiniCPM-V."""

    @pytest.fixture
    def slices(self) -> list[Any]:
        import torch

        return [torch.arange(12.0).reshape(2, 6), torch.arange(8.0).reshape(2, 4)]

    @pytest.mark.parametrize("kind", [list, tuple])
    def test_they_travel_as_their_elements_and_shapes_and_arrive_as_they_were(
        self, slices: list[Any], kind: type[Any]
    ) -> None:
        items = [{"pixels": _Element(kind(slices))}, {"pixels": _Element(kind(slices[:1]))}]
        fields = ItemFields.from_items(items)
        expected = {"pixels": "float32[*]", "pixels.shapes": "int64[*, 2]"}
        assert {name: str(field) for name, field in fields.fields.items()} == expected
        sent = _sent(Feature("image", to_tensors(items[0]), Layout((1,))))
        (entry,) = read(memoryview(b"".join(write({DIGEST: sent}))))
        assert isinstance(entry, FeatureEntry)
        data = fields.build(entry.feature)["pixels"].data
        assert type(data) is kind
        assert [one.shape for one in data] == [one.shape for one in slices]
        assert all(one.equal(other) for one, other in zip(data, slices, strict=True))

    @pytest.mark.parametrize("shapes", [[[2, 6], [2, 5]], [[-2, -6], [2, 4]], [[1 << 62, 4], [2, 4]], []])
    def test_shapes_that_do_not_use_up_the_elements_are_refused_S9(
        self, slices: list[Any], shapes: list[list[int]]
    ) -> None:
        import torch

        item = {"pixels": _Element(slices)}
        false = {"pixels.shapes": from_torch(torch.tensor(shapes, dtype=torch.int64).reshape(-1, 2))}
        feature = Feature("image", {**to_tensors(item), **false}, Layout((1,)))
        with pytest.raises(FeatureRejected, match="pixels has 20 elements, and its shapes are"):
            ItemFields.from_items([item, item]).build(feature)

    def test_those_of_different_ranks_are_not_carried(self, slices: list[Any]) -> None:
        with pytest.raises(ConfigError, match="pixels of an item differ in dtype or rank"):
            to_tensors({"pixels": _Element([slices[0], slices[0][0]])})


@pytest.mark.parametrize("family", ["gemma3", "idefics3", "llava", "qwen2-audio", "qwen2-vl", "whisper"])
def test_a_fast_path_makes_the_same_feature_with_the_same_origin_and_its_layout_is_proven(
    tiny: Folder, family: str
) -> None:
    fast, generic = HfProcessor.load(tiny(family), TARGET), VllmProcessor.load(tiny(family), TARGET)
    model = VllmModel(generic.processor.info.ctx.model_config, generic.processor)
    for modality in (modality for modality in fast.modalities if modality in SAMPLES):
        model._probe(modality)
        feature = fast.process(SAMPLES[modality](0))
        other = generic.process(SAMPLES[modality](0))
        assert feature.origin is not None
        assert other.origin is not None
        assert feature.origin.shape == other.origin.shape
        assert replace(feature, origin=None) == replace(other, origin=None)
        model.build(feature)
        pad = feature.layout.token_ids[0]
        with pytest.raises(FeatureRejected, match="its tensors make"):
            model.build(replace(feature, layout=Layout((pad, *feature.layout.token_ids))))


@pytest.mark.parametrize("is_shared", [True, False])
def test_what_belongs_to_the_model_and_not_to_an_item_cannot_be_another_S9(feature: Feature, is_shared: bool) -> None:
    """InternVL takes the token of its images from the last item it saw, for all requests."""
    import torch
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFieldElem,
        MultiModalKwargsItem,
        MultiModalSharedField,
    )

    field = MultiModalSharedField(batch_size=1) if is_shared else MultiModalBatchedField()
    items = [MultiModalKwargsItem({"token": MultiModalFieldElem(torch.tensor(7), field)}) for _ in range(3)]
    fields = ItemFields.from_items(items)
    right, wrong = (replace(feature, tensors={"token": from_torch(torch.tensor(token))}) for token in (7, 8))
    assert fields.build(right)["token"].data == 7
    if not is_shared:
        assert fields.build(wrong)["token"].data == 8
        return
    with pytest.raises(FeatureRejected, match="token is the same for all of this model's items"):
        fields.build(wrong)
