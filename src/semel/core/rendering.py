"""The engine's flags that change prompts or features, for whoever renders and preprocesses for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

__all__ = ["Rendering"]

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
    """Whether code of the model folder runs. A frontend has to be started with the flag too."""

    config_format: str = "auto"
    model_impl: str = "auto"
    hf_overrides: Mapping[str, object] | None = None
    media_io_kwargs: Mapping[str, Mapping[str, object]] | None = None
    """How media are read, by modality: which frames of a video, for example."""

    interleave_mm_strings: bool = False
    """Whether items stay where they are between texts, if the chat template takes texts only."""

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
