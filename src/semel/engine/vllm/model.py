"""One model as vLLM describes it: its fields, its replacements, its limits.

The description is the model's own registered processor, asked for what it does with one item. Nothing about any model
is written down here, so a model that vLLM knows keeps its own rules.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, Final, Self

from semel.core import Feature, Field, Layout, Mask, Modality, Target
from semel.engine.vllm.shape_registry import ShapeRegistry
from semel.errors import FeatureRejected
from semel.processing import family_of, to_torch

__all__ = ["VllmModel"]

_PROBE_SIDES: Final = ((112, 112), (168, 224))
_PROBE_SECONDS: Final = (1.0, 2.5)
_PROBE_FRAMES: Final = (4, 8)

logger = logging.getLogger(__name__)


class VllmModel:
    """A model's registered multimodal processor, used to describe and to build items one by one."""

    def __init__(self, model_config: Any, processor: Any) -> None:
        self._config = model_config
        self._processor = processor
        self._family = family_of(model_config.hf_config.model_type)
        self._hf_config: Mapping[str, Any] = model_config.hf_config.to_dict()
        self._tells_layout: frozenset[Modality] = frozenset()
        self.known = ShapeRegistry()

    @classmethod
    def of(cls, llm: Any) -> Self:
        """The model that an `AsyncLLM` serves."""
        from vllm.multimodal import MULTIMODAL_REGISTRY

        config = llm.model_config
        model = cls(config, MULTIMODAL_REGISTRY.create_processor(config, tokenizer=llm.renderer.tokenizer))
        model._tells_layout = frozenset(filter(model._knows_layout, model.max_items))
        return model

    @property
    def target(self) -> Target:
        """What the engine expects of a feature's numbers."""
        multimodal = self._config.get_multimodal_config()
        return Target(
            dtype=str(self._config.dtype).removeprefix("torch."),
            normalisation="engine" if multimodal.mm_device_do_normalize else "processor",
            options=multimodal.mm_processor_kwargs or {},
        )

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether items go to an encoder's prompt of their own."""
        return bool(self._config.is_encoder_decoder)

    @property
    def max_items(self) -> Mapping[Modality, int]:
        """How many items of a modality one prompt may have; a modality that is switched off is not listed."""
        limits: Mapping[Modality, int] = self._processor.info.allowed_mm_limits
        return {modality: limit for modality, limit in limits.items() if limit > 0}

    def fields(self, modality: Modality) -> Mapping[str, Field]:
        """The tensors of one item, from two probes of different size: what differs between them is free."""
        first, second = (self._hf_output(modality, probe) for probe in self._probes(modality))
        names = self._field_configs(modality, first).keys()
        return {name: _field(first[name], second[name]) for name in sorted(names)}

    def check(self, feature: Feature) -> str | None:
        """What is wrong with a feature's values that names, dtypes and shapes cannot tell."""
        for name, tensor in feature.tensors.items():
            values = to_torch(tensor)
            if values.is_floating_point() and not bool(values.isfinite().all()):
                return f"{name} has values that are no numbers"
        return self._family.check(self._hf_config, feature)

    def build(self, feature: Feature) -> Any:
        """The engine's item for a feature that the contract admits.

        Built alone, so that it carries no trace of its neighbours: vLLM's fields keep the slices of the whole batch
        that they were cut from, which makes serialising k items of one batch cost k².
        """
        tensors = {name: to_torch(tensor) for name, tensor in feature.tensors.items()}
        configs = self._field_configs(feature.modality, tensors)
        item = self._item(configs, tensors)
        self._check_rows(item, tensors)
        self._check_layout(feature, item)
        for element in item.values():
            if hasattr(element.field, "slices"):
                element.field = dataclasses.replace(element.field, slices=[])
        return item

    def _field_configs(self, modality: Modality, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        from transformers import BatchFeature

        configs = self._processor._get_mm_fields_config(BatchFeature(dict(tensors)), {})
        return {name: config for name, config in configs.items() if config.modality == modality and name in tensors}

    def _item(self, configs: Mapping[str, Any], tensors: Mapping[str, Any]) -> Any:
        from vllm.multimodal.inputs import MultiModalKwargsItem

        return MultiModalKwargsItem(
            {name: config.build_elems(name, tensors[name])[0] for name, config in configs.items()}
        )

    def _check_rows(self, item: Any, tensors: Mapping[str, Any]) -> None:
        """An item that is cut from its tensors has to use all of them."""
        for name, element in item.items():
            if element.data.numel() != tensors[name].numel():
                raise FeatureRejected(
                    f"{name} has the shape {list(tensors[name].shape)}, "
                    f"the feature's other tensors speak of {list(element.data.shape)}"
                )

    def _check_layout(self, feature: Feature, item: Any) -> None:
        """The model's own replacement for these tensors has to be the feature's layout."""
        modality = feature.modality
        if modality in self._tells_layout and (expected := self._replacement(modality, item)) != feature.layout:
            raise FeatureRejected(f"the {modality} feature has {feature.layout!r}, its tensors make {expected!r}")

    def _replacement(self, modality: Modality, item: Any) -> Layout:
        from vllm.multimodal.inputs import MultiModalKwargsItems
        from vllm.multimodal.parse import MultiModalDataItems

        items = MultiModalKwargsItems({modality: [item]})
        updates = self._processor._get_prompt_updates(MultiModalDataItems({}), {}, items)
        content = next(update for update in updates if update.modality == modality).resolve(0).content
        mask = None if content.is_embed is None else Mask(content.is_embed(content.full).tolist())
        return Layout(tuple(content.full), None if mask is None or mask.count == len(mask) else mask)

    def _knows_layout(self, modality: Modality) -> bool:
        """Whether the model tells the layout of such an item from its tensors alone."""
        output = self._hf_output(modality, self._probes(modality)[0])
        item = self._item(self._field_configs(modality, output), output)
        try:
            self._replacement(modality, item)
        except (KeyError, ValueError, TypeError, AttributeError, StopIteration) as error:
            logger.warning(
                "vLLM does not tell the layout of %s from its tensors alone (%r): a wrong number of embeddings is "
                "found only if the family's own check finds it",
                modality,
                error,
            )
            return False
        return True

    def _hf_output(self, modality: Modality, probe: Any) -> Mapping[str, Any]:
        items = self._processor.info.parse_mm_data({modality: [probe]})
        output: Mapping[str, Any] = self._processor._apply_hf_processor_main(items, {})
        return output

    def _probes(self, modality: Modality) -> tuple[Any, Any]:
        import numpy as np
        from PIL import Image

        if modality == "image":
            small, large = (Image.new("RGB", size) for size in _PROBE_SIDES)
            return small, large
        if modality == "audio":
            rate = self._processor.info.get_feature_extractor().sampling_rate
            short, long = (np.zeros(int(seconds * rate), np.float32) for seconds in _PROBE_SECONDS)
            return short, long
        few, many = (self._video_probe(frames) for frames in _PROBE_FRAMES)
        return few, many

    def _video_probe(self, frames: int) -> Any:
        """Some frames of black; a model that wants to know about time is told that two of them take a second."""
        import numpy as np

        pixels = np.zeros((frames, *_PROBE_SIDES[0], 3), np.uint8)
        if not self._processor.data_parser.video_needs_metadata:
            return pixels
        metadata = {"total_num_frames": frames, "fps": 2.0, "duration": frames / 2, "video_backend": "opencv"}
        return pixels, {**metadata, "frames_indices": list(range(frames)), "do_sample_frames": False}


def _field(first: Any, second: Any) -> Field:
    sizes = zip(first.shape, second.shape, strict=True)
    return Field(str(first.dtype).removeprefix("torch."), tuple(a if a == b else None for a, b in sizes))
