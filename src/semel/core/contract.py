"""The contract: what an engine expects of features.

A worker states it. A frontend produces features that meet it. The worker checks every feature against it before the
engine sees the feature (threats S9). It contains plain values only, so it can be sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from msgspec import UNSET, UnsetType

from semel.core.answer_settings import AnswerSettings
from semel.core.feature import Feature, Tensor
from semel.core.media import Modality
from semel.core.probes import Probes
from semel.core.rendering import Rendering
from semel.errors import FeatureRejected

__all__ = ["Contract", "Field", "Normalisation", "Target"]

Normalisation = Literal["processor", "engine"]
"""Where pixels are normalised: in the processor, which then sends floats, or in the engine, which receives uint8."""

_AS_IT_IS: Final = Rendering()
_NO_SETTINGS: Final = AnswerSettings()


@dataclass(frozen=True, slots=True)
class Target:
    """The dtype, normalisation and options that an engine expects of a feature, and the flags that change rendering."""

    dtype: str
    """The dtype of every floating point tensor; it is the engine's dtype."""

    normalisation: Normalisation = "processor"

    options: Mapping[str, object] | None = None
    """The `mm_processor_kwargs` that the engine was started with; a request's own override them."""

    rendering: Rendering = _AS_IT_IS
    """The engine's flags that change prompts or features."""


@dataclass(frozen=True, slots=True)
class Field:
    """The required dtype and shape of one tensor."""

    dtype: str
    shape: tuple[int | None, ...]
    """None matches any size: that dimension differs from item to item."""

    def admits(self, tensor: Tensor) -> bool:
        """Whether a tensor has this dtype and shape."""
        return (
            tensor.dtype == self.dtype
            and len(tensor.shape) == len(self.shape)
            and all(mine is None or mine == its for mine, its in zip(self.shape, tensor.shape, strict=True))
        )

    def has_form_of(self, tensor: Tensor) -> bool:
        """Whether a tensor has this dtype and as many dimensions."""
        return tensor.dtype == self.dtype and len(tensor.shape) == len(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join('*' if size is None else str(size) for size in self.shape)}]"


@dataclass(frozen=True, slots=True)
class Contract:
    """The features that a worker's engine expects, and its limits."""

    model: str
    fingerprint: str
    """Fingerprint of the processor that must make the features (`semel.processing.fingerprint`)."""

    target: Target
    fields: Mapping[Modality, Mapping[str, Field]]
    """The tensors of one item, by modality and the model's field names."""

    max_items: Mapping[Modality, int]
    """Maximum number of items of one modality in a prompt."""

    max_embeds: int
    """Maximum number of embeddings of one item: the capacity of the engine's encoder cache."""

    max_tokens: int
    """Maximum number of tokens of a prompt and its answer together."""

    cache_bytes: int = 0
    """Capacity of the engine's item cache; 0 if it is off."""

    needs_seal: tuple[Modality, ...] = ()
    """The modalities whose tensors a client may send only with a seal of the fleet."""

    aliases: tuple[str, ...] = ()
    """Further names that clients may call the model by."""

    probes: Probes | None = None
    """What the worker's libraries made of the probes; the fingerprint covers it."""

    answers: AnswerSettings = _NO_SETTINGS
    """What else changes answers."""

    cell: str | UnsetType = UNSET
    """The cell that the worker belongs to, if there are several. Without one, nothing of it is sent."""

    def check(self, feature: Feature) -> None:
        """Reject a feature with wrong names, dtypes, shapes or size."""
        for name in self.check_form(feature):
            raise FeatureRejected(
                f"{name} is {feature.tensors[name]!r}, {self.model} takes {self.fields[feature.modality][name]}"
            )

    def check_form(self, feature: Feature) -> list[str]:
        """Reject a feature with wrong names, dtypes, ranks or size. Returns the names of tensors of other shapes."""
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
            if not field.has_form_of(feature.tensors[name]):
                raise FeatureRejected(f"{name} is {feature.tensors[name]!r}, {self.model} takes {field}")
        if not feature.layout.num_embeds:
            raise FeatureRejected(f"the {feature.modality} feature has no embedding: {feature.layout!r}")
        if feature.layout.num_embeds > self.max_embeds:
            raise FeatureRejected(
                f"the {feature.modality} feature has {feature.layout.num_embeds:,} embeddings, the engine's encoder "
                f"cache holds {self.max_embeds:,}; start the engine with a larger --max-num-batched-tokens"
            )
        return [name for name, field in fields.items() if not field.admits(feature.tensors[name])]
