"""Pooling: what a model makes of a whole prompt instead of tokens, such as an embedding or classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from msgspec import Struct

__all__ = ["FLOAT_BYTES", "POOLING_TASKS", "PairForm", "PoolingModel", "PoolingOutput", "PoolingTask"]

PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]
"""vLLM's names: one vector or one list of classes for a prompt, or for each of its tokens."""

PairForm = Literal["joined", "pair"]
"""The way in which a query and a document become one prompt: one text after the other, or the tokenizer's pair."""

POOLING_TASKS: Final[tuple[PoolingTask, ...]] = get_args(PoolingTask)
FLOAT_BYTES: Final = 4
"""Of a number in a `PoolingOutput`: float32, little endian."""


@dataclass(frozen=True, slots=True)
class PoolingModel:
    """A model that pools, in a worker's contract."""

    task: PoolingTask
    """The one that it is served for (vLLM: `--pooler-config.task`)."""

    supported: tuple[PoolingTask, ...]
    """All that it could be served for."""

    labels: tuple[str | None, ...] = ()
    """The names of its classes, in order; None where a class has none."""

    scores: bool = False
    """True if it can score pairs: by embeddings of prompts or of tokens, or as a cross-encoder with one class."""

    pair_form: PairForm = "pair"
    """The prompts of a cross-encoder without a template of the operator's (vLLM: `use_sep_token`)."""

    instructions: Mapping[str, str] = field(default_factory=dict)
    """The texts that its prompts begin with, by Cohere's `input_type`."""

    config: Mapping[str, object] = field(default_factory=dict)
    """vLLM's `PoolerConfig`, as far as it is set."""


class PoolingOutput(Struct, frozen=True):
    """A piece of what was pooled: large outputs travel in several."""

    shape: tuple[int, ...]
    """Of the whole: one dimension, or tokens and numbers."""

    data: bytes
    """The bytes of this piece: float32, little endian, in C order."""
