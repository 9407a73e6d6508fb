"""The contract: what an engine expects of the features that it is given.

A worker states it, a frontend produces to it, and a worker holds every feature against it before the engine sees one
(threats S9). Made of plain values, so that it can travel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from semel.core.feature import Feature, Tensor
from semel.core.media import Modality
from semel.errors import FeatureRejected

__all__ = ["Contract", "Field", "Normalisation", "Target"]

Normalisation = Literal["processor", "engine"]
"""Who normalises pixels: the processor, before they travel as floats, or the engine, which then gets uint8."""


@dataclass(frozen=True, slots=True)
class Target:
    """What an engine expects of a feature's numbers."""

    dtype: str
    """The dtype of every floating point tensor: the engine's own."""

    normalisation: Normalisation = "processor"

    options: Mapping[str, object] | None = None
    """The `mm_processor_kwargs` that the engine was started with; those of a request go on top."""


@dataclass(frozen=True, slots=True)
class Field:
    """What the tensor of one name must look like."""

    dtype: str
    shape: tuple[int | None, ...]
    """None stands for a dimension that differs from item to item."""

    def admits(self, tensor: Tensor) -> bool:
        """Whether a tensor looks like this."""
        return (
            tensor.dtype == self.dtype
            and len(tensor.shape) == len(self.shape)
            and all(mine is None or mine == its for mine, its in zip(self.shape, tensor.shape, strict=True))
        )

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join('*' if size is None else str(size) for size in self.shape)}]"


@dataclass(frozen=True, slots=True)
class Contract:
    """What a worker's engine expects, and how much of it."""

    model: str
    fingerprint: str
    """The processor that the engine's features must come from (`semel.processing.fingerprint`)."""

    target: Target
    fields: Mapping[Modality, Mapping[str, Field]]
    """The tensors of one item, by the field names of its model."""

    max_items: Mapping[Modality, int]
    """Items of one modality in one prompt."""

    max_embeds: int
    """Embeddings of one item: what the engine's encoder cache holds."""

    max_tokens: int
    """Tokens of one prompt and its answer together."""

    cache_bytes: int = 0
    """What the engine's item cache holds; 0: it is off."""

    def check(self, feature: Feature) -> None:
        """Refuse a feature of wrong names, dtypes, shapes or size."""
        fields = self.fields.get(feature.modality)
        if fields is None:
            raise FeatureRejected(
                f"{self.model} takes no {feature.modality}; it takes {', '.join(self.fields) or 'text only'}"
            )
        if feature.tensors.keys() != fields.keys():
            raise FeatureRejected(
                f"the {feature.modality} feature has the tensors {sorted(feature.tensors)}, "
                f"{self.model} takes {sorted(fields)}"
            )
        for name, field in fields.items():
            if not field.admits(feature.tensors[name]):
                raise FeatureRejected(f"{name} is {feature.tensors[name]!r}, {self.model} takes {field}")
        if not feature.layout.num_embeds:
            raise FeatureRejected(f"the {feature.modality} feature has no embedding: {feature.layout!r}")
        if feature.layout.num_embeds > self.max_embeds:
            raise FeatureRejected(
                f"the {feature.modality} feature has {feature.layout.num_embeds:,} embeddings, the engine's encoder "
                f"cache holds {self.max_embeds:,}; start the engine with a larger --max-num-batched-tokens"
            )
