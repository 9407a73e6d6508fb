"""One model as vLLM describes it: its fields, its replacements, its limits.

The description is the model's own registered processor, asked for what it does with one item. Nothing about any model
is written down here, so a model that vLLM knows keeps its own rules.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final, Self

from blake3 import blake3

from semel.cache import LayoutCache
from semel.core import Contract, Digest, Feature, Field, Layout, LruMap, Modality, Origin, Target
from semel.engine.vllm.model.assembly import company_limits
from semel.engine.vllm.model.fields import ItemFields
from semel.engine.vllm.model.item import lay_out, make_item, make_stub, parse
from semel.engine.vllm.model.prompt_rules import item_part
from semel.engine.vllm.model.rendering import read_rendering
from semel.errors import ConfigError, FeatureRejected
from semel.processing import Family, family_of, to_torch

__all__ = ["ShapeRegistry", "VllmModel", "read_target"]

_MIN_PROBES: Final = 2
_MAX_COUNTED_BYTES: Final = 1 << 20
_MAX_COUNTED_FLOATS: Final = 64
_MAX_VALUE: Final = 65_504.0  # of float16: an encoder makes infinities of what is larger, and then NaN
_FOREIGN: Final = (ArithmeticError, AttributeError, LookupError, RuntimeError, StopIteration, TypeError, ValueError)

_MAX_DIGESTS: Final = 1 << 18
"""More than any engine's caches hold; an entry takes about 200 bytes."""

_SIDES: Final = (
    *((112, 112), (56, 56), (168, 224), (640, 480), (1024, 1024)),
    *((1920, 1080), (300, 900), (2000, 300), (4096, 64)),
)
"""Widths and heights."""

_SECONDS: Final = (1.0, 0.4, 2.5, 5.0, 15.0, 31.0)
_VIDEOS: Final = ((4, 112, 112), (8, 112, 112), (8, 168, 224), (16, 224, 112))
"""Frames, heights and widths."""

logger = logging.getLogger(__name__)


def _probes(processor: Any, modality: Modality) -> Iterator[Any]:
    """Yield media that differ as much as clients' do. They are not black: a processor may look for content."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    if modality == "image":
        for width, height in (*_SIDES, *_largest(processor)):
            yield Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8))
    elif modality == "audio":
        rate = processor.info.get_feature_extractor().sampling_rate
        for seconds in _SECONDS:
            yield random.standard_normal(int(seconds * rate), np.float32) * np.float32(0.1)
    else:
        for shape in _VIDEOS:
            pixels = random.integers(0, 256, (*shape, 3), np.uint8)
            yield (pixels, _times(shape[0])) if processor.data_parser.video_needs_metadata else pixels


def _times(frames: int) -> dict[str, Any]:
    """Return the timing for a model that wants it: two frames take a second."""
    described = {"total_num_frames": frames, "fps": 2.0, "duration": frames / 2, "video_backend": "opencv"}
    return {**described, "frames_indices": list(range(frames)), "do_sample_frames": False}


def _largest(processor: Any) -> Iterator[tuple[int, int]]:
    """Yield the size of the image with the most tokens, where the model tells and it is no larger than a photograph."""
    tell = getattr(processor.info, "get_image_size_with_most_features", None)
    if tell is None:
        return
    try:
        width, height = tell()
    except Exception:  # noqa: BLE001 - foreign code; there are other probes
        return
    if width * height <= 4096 * 4096:
        yield width, height


class ShapeRegistry:
    """The shapes of the features that went into an engine lately, by digest.

    An engine that holds an item goes by its digest alone. A second feature under the same digest, well-formed but of
    another size, would be counted by its own layout and filled with the first one's embeddings; that ends the engine.
    So its shape must be the same each time. What the digest stands for cannot be checked (requirements D7).
    """

    def __init__(self, max_digests: int = _MAX_DIGESTS) -> None:
        self._shapes: LruMap[Digest, int] = LruMap(max_digests)

    def agrees(self, digest: Digest, feature: Feature) -> bool:
        """Return whether a digest is new or came with the same shape before; then it is remembered."""
        tensors = tuple((name, tensor.dtype, tensor.shape) for name, tensor in feature.tensors.items())
        shape = hash((feature.modality, feature.layout, tensors))
        if self._shapes.peek(digest) not in (None, shape):
            return False
        self._shapes.put(digest, shape)
        return True

    def refer(self, digest: Digest) -> None:
        """Keep a digest that came without its feature as long as one that came with it."""
        self._shapes.get(digest)

    def forget(self) -> None:
        """Forget all, when the engine does."""
        self._shapes.clear()


def read_target(model_config: Any) -> Target:
    """Return what an engine of this configuration expects of a feature's numbers."""
    multimodal = model_config.get_multimodal_config()
    return Target(
        dtype=str(model_config.dtype).removeprefix("torch."),
        normalisation="engine" if multimodal.mm_device_do_normalize else "processor",
        options=multimodal.mm_processor_kwargs or {},
        rendering=read_rendering(model_config),
    )


class VllmModel:
    """A model's registered multimodal processor, used to describe and to build items one by one."""

    def __init__(self, model_config: Any, processor: Any) -> None:
        self._config = model_config
        self.processor = processor
        """The engine's own, of vLLM."""
        self._hf_config: Mapping[str, Any] = model_config.hf_config.to_dict()
        self._family = family_of(self._hf_config)
        self._items: dict[Modality, ItemFields] = {}
        self._tells_layout: set[Modality] = set()
        self._counts_rows: set[Modality] = set()
        self._layouts: LayoutCache[tuple[object, ...]] = LayoutCache(max_entries=4_096, max_tokens=1 << 20)
        self._widened: set[tuple[Modality, str]] = set()
        self._company = company_limits(processor, self._family, self._hf_config)
        self.known = ShapeRegistry()

    @classmethod
    def from_llm(cls, llm: Any) -> Self:
        """Return the model that an `AsyncLLM` serves."""
        from vllm.multimodal import MULTIMODAL_REGISTRY

        config = llm.model_config
        model = cls(config, MULTIMODAL_REGISTRY.create_processor(config, tokenizer=llm.renderer.tokenizer))
        for modality in model._limits:
            model._probe(modality)
        return model

    @property
    def target(self) -> Target:
        """The dtype and device that the engine expects of a feature's numbers."""
        return read_target(self._config)

    @property
    def is_encoder_decoder(self) -> bool:
        """True if items go to an encoder's prompt of their own."""
        return bool(self._config.is_encoder_decoder)

    @property
    def max_items(self) -> Mapping[Modality, int]:
        """Maximum number of items of a modality in one prompt; a modality that is switched off is not listed."""
        return {modality: limit for modality, limit in self._limits.items() if modality in self._items}

    @property
    def needs_seal(self) -> tuple[Modality, ...]:
        """The modalities whose tensors a client may send only with a seal of the fleet.

        Nobody can prove of them that the encoder makes as many embeddings of them as their layout has.
        """
        return () if type(self._family).check is not Family.check else tuple(self._items)

    def fields(self, modality: Modality) -> Mapping[str, Field]:
        """Return what the tensors of one item have in common."""
        return self._items[modality].fields

    def check(self, feature: Feature) -> str | None:
        """Return what is wrong with a feature's values that names, dtypes and shapes cannot tell."""
        for name, tensor in feature.tensors.items():
            values = to_torch(tensor)
            if not values.is_floating_point() or not values.numel():
                continue
            lowest, highest = values.aminmax()  # one that is no number is both
            if not -_MAX_VALUE <= float(lowest) <= float(highest) <= _MAX_VALUE:
                return f"{name} has values that are no numbers, or beyond ±{_MAX_VALUE:,.0f}"
        return self._family.check(self._hf_config, feature)

    def admit(self, feature: Feature, contract: Contract) -> None:
        """Hold a feature against the contract.

        What is only probed may be wider than all probes: a feature that says what it was made of comes from the fleet's
        own processors, and its layout is proven. One of an unknown origin is held to the letter, and so is one of a
        family whose shapes are known.
        """
        if feature.origin is None or feature.modality not in self.needs_seal:
            contract.check(feature)
            return
        for name in contract.check_form(feature):
            if (feature.modality, name) not in self._widened:
                self._widened.add((feature.modality, name))
                expected = contract.fields[feature.modality][name]
                logger.warning("%s is wider than all probes: %r for %s", name, feature.tensors[name], expected)

    def build(self, feature: Feature) -> Any:
        """Return the engine's item for a feature that the contract admits; its layout is proven."""
        fields = self._items[feature.modality]
        item = fields.build(feature)
        if feature.modality in self._counts_rows:
            fields.check_rows(self.processor, feature, item)
        self._check_layout(feature, item)
        return item

    def build_with_updates(self, feature: Feature, origin: Origin) -> tuple[Any, Any]:
        """Return the engine's item for a feature of its pool, and vLLM's updates of a prompt with it.

        The feature's layout does not matter: the updates say what stands in the prompt. Its form, and that its tensors
        fit together, is checked: the process that made it has decoded a client's file.
        """
        from vllm.multimodal.inputs import MultiModalKwargsItems

        modality, fields = feature.modality, self._items[feature.modality]
        if feature.tensors.keys() != fields.fields.keys() or not all(
            fields.fields[name].has_form_of(tensor) for name, tensor in feature.tensors.items()
        ):
            raise FeatureRejected(f"the {modality} has other tensors than this model takes: {feature.tensors!r}")
        item = fields.build(feature)
        if modality in self._counts_rows:
            fields.check_rows(self.processor, feature, item)
        stub = parse(self.processor, modality, make_stub(modality, origin))
        items = MultiModalKwargsItems({modality: [item]})
        updates = self.processor._get_mm_prompt_updates(stub, origin.options or {}, items)
        return item, updates[modality][0]

    @property
    def _limits(self) -> Mapping[Modality, int]:
        limits: Mapping[Modality, int] = self.processor.info.allowed_mm_limits
        lowered = {modality: min(limit, self._company.get(modality, limit)) for modality, limit in limits.items()}
        return {modality: limit for modality, limit in lowered.items() if limit > 0}

    def _probe(self, modality: Modality) -> None:
        """Learn the fields of a modality; one that the processor cannot do is switched off."""
        made = []
        cause: Exception | None = None
        for medium in _probes(self.processor, modality):
            try:
                made.append(make_item(self.processor, modality, parse(self.processor, modality, medium), {}))
            except Exception as error:  # noqa: BLE001 - foreign code: a probe may be too long or too thin for a model
                cause = error
        if len(made) < _MIN_PROBES:
            logger.error("this model takes no %s: its processor refuses semel's probes: %r", modality, cause)
            return
        try:
            self._items[modality] = ItemFields.from_items(made)
        except ConfigError as error:
            logger.error("this model takes no %s through semel: %s", modality, error)  # noqa: TRY400 - it says all
            return
        if self._knows_layout(modality, made[0]):
            self._tells_layout.add(modality)
        if all(self._can_count_rows(modality, item) for item in made):
            self._counts_rows.add(modality)

    def _check_layout(self, feature: Feature, item: Any) -> None:
        """Check that the model's own replacement for this item is the feature's layout."""
        modality, origin = feature.modality, feature.origin
        if origin is not None:
            expected = self._expected(feature, origin, item)
        elif modality in self._tells_layout:
            expected = self._replacement(modality, None, item, {})
        elif modality in self.needs_seal:
            raise FeatureRejected(
                f"the {modality} feature does not say of what it was made, so nothing proves its layout: "
                "have this fleet render it, and send the file with its metadata"
            )
        else:
            return  # the family's own check has proven it
        if expected != feature.layout:
            raise FeatureRejected(f"the {modality} feature has {feature.layout!r}, its tensors make {expected!r}")

    def _expected(self, feature: Feature, origin: Origin, item: Any) -> Layout:
        """Compute the layout from a feature's origin and the numbers in it, once for all of a size."""
        key = (feature.modality, origin.shape, _text(origin.metadata), _text(origin.options), *_counts(feature))
        if (layout := self._layouts.get(key)) is None:
            layout = self._replacement(feature.modality, origin, item, origin.options or {})
            self._layouts.put(key, layout)
        return layout

    def _replacement(
        self, modality: Modality, origin: Origin | None, item: Any, options: Mapping[str, object]
    ) -> Layout:
        from vllm.multimodal.parse import MultiModalDataItems

        try:
            items = MultiModalDataItems({})
            if origin is not None:
                items = parse(self.processor, modality, make_stub(modality, origin))
            part_of = partial(item_part, self.processor, self._family, self._hf_config)
            return lay_out(self.processor, modality, items, item, options, part_of)
        except _FOREIGN as error:
            raise FeatureRejected(f"the {modality} feature cannot be laid out: {type(error).__name__}") from error

    def _can_count_rows(self, modality: Modality, item: Any) -> bool:
        """Check that vLLM cuts an item's own tensors as those of the HF processor, so that rows can be compared."""
        try:
            self._items[modality].check_rows(self.processor, Feature(modality, {}, Layout(())), item)
        except FeatureRejected as error:
            logger.info("the rows of %s are not compared with what its tensors count: %r", modality, error.__cause__)
            return False
        return True

    def _knows_layout(self, modality: Modality, item: Any) -> bool:
        """Return whether the model tells the layout of such an item from its tensors alone."""
        try:
            self._replacement(modality, None, item, {})
        except FeatureRejected:
            return False
        return True


def _text(value: Mapping[str, object] | None) -> str:
    return "" if not value else json.dumps(value, sort_keys=True, default=str)


def _counts(feature: Feature) -> list[object]:
    """Return what a layout may depend on: the numbers that count, and of pixels and samples the shape."""
    counts: list[object] = []
    for name, tensor in feature.tensors.items():
        counts += (name, tensor.dtype, tensor.shape)
        is_float = "float" in tensor.dtype
        few = tensor.nbytes <= (_MAX_COUNTED_FLOATS * 8 if is_float else _MAX_COUNTED_BYTES)
        if few and tensor.dtype != "uint8":
            counts.append(blake3(tensor.data).digest())
    return counts
