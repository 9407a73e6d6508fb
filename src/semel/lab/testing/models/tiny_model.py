"""A tiny model for tests: the writer of its folder, and the flags with which vLLM serves it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["Serving", "TinyModel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The flags with which vLLM serves a tiny model on a CPU."""

    max_items: Mapping[str, int]
    """How many items of each modality a prompt may have; the modalities are its keys."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    max_model_len: int = 8192
    flags: tuple[str, ...] = ()
    """vLLM's flags besides those that follow from the other fields."""

    level: Literal["engine", "processor"] = "engine"
    """How much of it runs on a CPU: all, or only vLLM's processor of the family."""

    @property
    def modalities(self) -> tuple[str, ...]:
        """The kinds of media that the model takes."""
        return tuple(self.max_items)

    @property
    def engine_flags(self) -> tuple[str, ...]:
        """Return what follows the model on the command line of `vllm serve` or `semel worker`."""
        return (
            *("--dtype", self.dtype, "--enforce-eager", "--max-model-len", str(self.max_model_len)),
            *("--limit-mm-per-prompt", json.dumps(dict(self.max_items))),
            *self.flags,
        )


@dataclass(frozen=True, slots=True)
class TinyModel:
    """One family: its writer, which fills a directory that exists, and how it is served."""

    write: Callable[[Path], None]
    serving: Serving
