"""The fields of a modality's items: what the contract says of them, and how an item is built from a feature.

Both are read from items that the model's own processor made of very different media. What all of them have in common is
fixed; what differs is free. Of vLLM's field objects only their kind matters to the engine, so one of each is enough.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from semel.core import Feature, Field, Tensor
from semel.engine.vllm.model.item import has_tensors, shapes_name, to_tensors, unpack
from semel.errors import ConfigError, FeatureRejected
from semel.processing import to_torch

__all__ = ["ItemFields"]


@dataclass(frozen=True, slots=True)
class _Prototype:
    """The engine's treatment of a field."""

    field: Any
    """vLLM's own, without the slices of a batch: serialising k items of one batch would cost k²."""

    sequence: type[list[Any] | tuple[Any, ...]] | None
    """The kind of the data if it is a list or a tuple, of tensors or of numbers."""

    has_tensors: bool
    """Or else it is a number, or a list of them."""

    @classmethod
    def from_element(cls, element: Any) -> Self:
        field = element.field
        if hasattr(field, "slices"):
            field = dataclasses.replace(field, slices=[])
        if hasattr(field, "batch_size"):
            field = dataclasses.replace(field, batch_size=1)
        sequence = next((kind for kind in (list, tuple) if isinstance(element.data, kind)), None)
        return cls(field, sequence, hasattr(element.data, "numel") or has_tensors(element.data))

    def to_data(self, name: str, tensors: Mapping[str, Tensor]) -> Any:
        """Return a field's data as the processor makes it."""
        values = to_torch(tensors[name])
        if not self.has_tensors:
            return values.tolist() if self.sequence is None else self.sequence(values.tolist())
        if self.sequence is None:
            return values
        return self.sequence(unpack(name, values, to_torch(tensors[shapes_name(name)]).tolist()))

    def to_batch(self, data: Any) -> Any:
        """Return a field's data as the HF processor returns it for one item alone."""
        from vllm.multimodal.inputs import MultiModalBatchedField

        if not isinstance(self.field, MultiModalBatchedField):
            return data
        return data.unsqueeze(0) if self.has_tensors and self.sequence is None else [data]


class ItemFields:
    """The fields of the items of one modality."""

    def __init__(
        self, prototypes: Mapping[str, _Prototype], fields: Mapping[str, Field], constants: Mapping[str, bytes]
    ) -> None:
        self._prototypes = prototypes
        self._constants = constants
        self.fields = fields
        """The contract's requirements of them."""

    @classmethod
    def from_items(cls, items: Sequence[Any]) -> Self:
        """Return the fields that all of these items have."""
        first = items[0]
        prototypes = {name: _Prototype.from_element(first[name]) for name in sorted(first)}
        for item in items:
            if {name: _Prototype.from_element(item[name]) for name in sorted(item)} != prototypes:
                raise ConfigError("the fields of its items differ in kind from item to item")
        tensors = [to_tensors(item) for item in items]
        return cls(
            prototypes,
            {name: _field(name, [one[name] for one in tensors]) for name in tensors[0]},
            {name: bytes(tensors[0][name].data) for name in prototypes if _is_constant(first[name], name, tensors)},
        )

    def build(self, feature: Feature) -> Any:
        """Return the engine's item for a feature that the contract admits. It has no trace of any neighbour."""
        from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalKwargsItem

        for name, value in self._constants.items():
            if bytes(feature.tensors[name].data) != value:
                raise FeatureRejected(f"{name} is the same for all of this model's items, the feature has another")
        return MultiModalKwargsItem(
            {
                name: MultiModalFieldElem(data=prototype.to_data(name, feature.tensors), field=prototype.field)
                for name, prototype in self._prototypes.items()
            }
        )

    def check_rows(self, processor: Any, feature: Feature, item: Any) -> None:
        """Check that the counts in one field use up the field that vLLM cuts by them."""
        from transformers import BatchFeature

        batch = {name: prototype.to_batch(item[name].data) for name, prototype in self._prototypes.items()}
        try:
            configs = processor._get_mm_fields_config(BatchFeature(batch), _options(feature))
            cut = {
                name: config.build_elems(name, batch[name])[0]
                for name, config in configs.items()
                if config.modality == feature.modality and name in batch
            }
        except (ValueError, TypeError, RuntimeError, LookupError, ArithmeticError, AttributeError) as error:
            raise FeatureRejected(f"the tensors of the {feature.modality} feature do not fit together") from error
        for name, element in cut.items():
            if hasattr(element.data, "numel") and element.data.numel() != item[name].data.numel():
                raise FeatureRejected(
                    f"{name} has the shape {list(item[name].data.shape)}, "
                    f"the feature's other tensors speak of {list(element.data.shape)}"
                )


def _is_constant(element: Any, name: str, tensors: Sequence[Mapping[str, Tensor]]) -> bool:
    """Check whether a field belongs to the model and not to an item: some models apply it to every later request."""
    from vllm.multimodal.inputs import MultiModalSharedField

    is_shared = isinstance(element.field, MultiModalSharedField)
    return is_shared and len({bytes(one[name].data) for one in tensors}) == 1


def _options(feature: Feature) -> Mapping[str, object]:
    return {} if feature.origin is None else feature.origin.options or {}


def _field(name: str, tensors: Sequence[Tensor]) -> Field:
    first = tensors[0]
    if any((one.dtype, len(one.shape)) != (first.dtype, len(first.shape)) for one in tensors):
        raise ConfigError(f"{name} differs in dtype or rank from item to item: {', '.join(sorted(map(repr, tensors)))}")
    sizes = zip(*(tensor.shape for tensor in tensors), strict=True)
    return Field(first.dtype, tuple(next(iter(own)) if len(own := {*size}) == 1 else None for size in sizes))
