"""The contract: what an engine expects of features.

A worker states it. A frontend produces features that meet it. The worker checks every feature against it before the
engine sees the feature (threats S9). It contains plain values only, so it can be sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Final, Literal

from blake3 import blake3
from msgspec import UNSET, UnsetType

from semel.core.adapter import Adapter
from semel.core.feature import Feature, Tensor
from semel.core.pooling import PoolingModel
from semel.core.prompt import Modality
from semel.errors import FeatureRejected

__all__ = ["PROBE_BYTES", "AnswerSettings", "Contract", "Field", "Normalisation", "Probes", "Rendering", "Target"]

_NOT_OF_FEATURES: Final = frozenset(
    {"code_revision", "config_format", "interleave_mm_strings", "revision", "tokenizer", "tokenizer_mode"}
    | {"tokenizer_revision", "trust_remote_code"}
)
"""These change prompts only, or say which files count, whose contents a fingerprint covers by themselves."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """vLLM's flags of these names, with vLLM's defaults."""

    tokenizer: str | None = None
    """The folder or name of a tokenizer that is not the model's own."""

    tokenizer_revision: str | None = None
    tokenizer_mode: str = "auto"
    revision: str | None = None
    """Of the model on the hub: what the worker resolved it to."""

    code_revision: str | None = None
    trust_remote_code: bool = False
    """True lets code of the model folder run. A frontend has to be started with the flag too."""

    config_format: str = "auto"
    model_impl: str = "auto"
    hf_overrides: Mapping[str, object] | None = None
    media_io_kwargs: Mapping[str, Mapping[str, object]] | None = None
    """Arguments for reading media, by modality: which frames of a video, for example."""

    interleave_mm_strings: bool = False
    """True keeps items where they are between texts, if the chat template takes texts only."""

    @property
    def changed(self) -> Mapping[str, object]:
        """The flags that are not at their defaults, by name."""
        plain = Rendering()
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in values.items() if value != getattr(plain, name)}

    @property
    def of_features(self) -> Mapping[str, object]:
        """Those of them that change features, whatever the files hold."""
        return {name: value for name, value in self.changed.items() if name not in _NOT_OF_FEATURES}


PROBE_BYTES: Final = 4
"""The bytes of one probe's hash."""


@dataclass(frozen=True, slots=True)
class Probes:
    """The results of all probes in one process: small media that every frontend and worker decodes when it starts.

    Two processes with equal results make equal features, whatever patches of their libraries they run.
    """

    catalogue: str
    """A hash of the probes' names and media."""

    results: bytes
    """The hashes of what came out, in the catalogue's order."""

    versions: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Of the libraries, to be reported where results differ; equal results may have different ones."""

    def __len__(self) -> int:
        return len(self.results) // PROBE_BYTES

    @property
    def hash(self) -> str:
        """Of all results together."""
        return blake3(self.catalogue.encode() + b"\0" + self.results).hexdigest()

    def first_difference(self, other: Probes) -> int | None:
        """Return the number of the first probe of the same catalogue whose results differ."""
        for start in range(0, max(len(self.results), len(other.results)), PROBE_BYTES):
            part = slice(start, start + PROBE_BYTES)
            if self.results[part] != other.results[part]:
                return start // PROBE_BYTES
        return None


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """Workers of one fleet have the same, or a client would get other answers from one of them."""

    weights: str = ""
    """A hash of the weights' headers, sizes, samples and revision, and how they are loaded and quantized."""

    tool_call_parser: str | None = None
    enable_auto_tool_choice: bool = False
    tool_strict_level: str = "auto"
    reasoning_parser: str | None = None
    parser_plugins: Mapping[str, str] = field(default_factory=dict)
    """A hash of each plug-in's file, by the file's name."""

    generation_config: Mapping[str, object] = field(default_factory=dict)
    """The sampling parameters of a request that names none."""

    chat_template: str = ""
    """A hash of the chat template in the model folder."""


Normalisation = Literal["processor", "engine"]
"""The place where pixels become floats: the processor, which then sends floats, or the engine, which receives uint8."""

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
        """Return whether a tensor has this dtype and shape."""
        sizes = zip(self.shape, tensor.shape, strict=False)
        return self.has_form_of(tensor) and all(mine is None or mine == its for mine, its in sizes)

    def has_form_of(self, tensor: Tensor) -> bool:
        """Return whether a tensor has this dtype and as many dimensions."""
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
    """Of one modality in a prompt."""

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
    """The results of the worker's libraries; the fingerprint covers them."""

    answers: AnswerSettings = _NO_SETTINGS
    """Other settings that change answers."""

    cell: str | UnsetType = UNSET
    """The cell that the worker belongs to, if there are several. Without one, nothing of it is sent."""

    pooling: PoolingModel | UnsetType = UNSET
    """The form of its answers, of a model that pools (vLLM: `--runner pooling`). One that generates sends nothing."""

    adapters: tuple[Adapter, ...] | UnsetType = UNSET
    """The adapters that the engine has loaded, of one that takes any (vLLM: `--enable-lora`)."""

    @property
    def max_prompt_tokens(self) -> int:
        """The most tokens of a prompt: an answer of tokens needs room for one at least."""
        return self.max_tokens - (self.pooling is UNSET)

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
        for name, expected in fields.items():
            if not expected.has_form_of(feature.tensors[name]):
                raise FeatureRejected(f"{name} is {feature.tensors[name]!r}, {self.model} takes {expected}")
        if not feature.layout.num_embeds:
            raise FeatureRejected(f"the {feature.modality} feature has no embedding: {feature.layout!r}")
        if feature.layout.num_embeds > self.max_embeds:
            raise FeatureRejected(
                f"the {feature.modality} feature has {feature.layout.num_embeds:,} embeddings, the engine's encoder "
                f"cache holds {self.max_embeds:,}; start the engine with a larger --max-num-batched-tokens"
            )
        return [name for name, field in fields.items() if not field.admits(feature.tensors[name])]
