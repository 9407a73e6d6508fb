"""A family as a table: what its folder is written from.

One function writes all of them. A family that is a `Declaration` has its values only: classes of transformers, sizes,
special tokens, a chat template, gains of weights, and the names that its published checkpoints give to its tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from semel.lab.testing.models import weights
from semel.lab.testing.models.text import END_GAIN, GAINS, VOCABULARY_TOKENS, Vocabulary, byte_level, qwen2, train

if TYPE_CHECKING:
    from semel.lab.testing.models.weights import Shapes, Tensors

__all__ = ["Declaration", "IdOf", "JsonConfig", "Serving", "TinyModel", "prefixed", "write_folder"]


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


IdOf = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class JsonConfig:
    """A configuration whose class is not in transformers: `config.json` and nothing else."""

    values: Mapping[str, Any]

    def save_pretrained(self, directory: Path) -> None:
        """Write the file, as classes of transformers do."""
        (directory / "config.json").write_text(json.dumps(dict(self.values), indent=2, sort_keys=True) + "\n")


def prefixed(prefixes: Mapping[str, str]) -> Callable[[Tensors], Tensors]:
    """Published names that differ by their prefixes."""
    return lambda tensors: weights.rename(tensors, prefixes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """One family."""

    family: str
    config: Callable[[IdOf], Any]
    """The model's configuration, from the ids of its tokens."""

    shapes: Callable[[Any], Shapes] | None
    """Names and shapes of the tensors of a configuration; mostly `weights.of_class`. None if there are no weights."""

    processor: Callable[[Any], Any]
    """The processor, from the tokenizer. One that transformers does not have is None: vLLM has its own."""

    special_tokens: tuple[str, ...]
    end: str
    """The special token that ends an answer."""

    stops: tuple[str, ...] = ()
    """Further tokens that end an answer."""

    pad: str
    named_tokens: Mapping[str, str] | None = None
    """Roles of special tokens; None for the tokenizer of Qwen2."""

    own_tokenizer: Callable[[Vocabulary], Any] | None = None
    """A tokenizer of a class of its own, before the plain tokens are added."""

    plain_tokens: tuple[str, ...] = ()
    """Further tokens of the vocabulary that are not special."""

    vocabulary_tokens: int = VOCABULARY_TOKENS
    chat_template: str | None
    generation: Callable[[IdOf], Mapping[str, Any]] = lambda _: {}
    """Further values of the generation configuration."""

    gains: Mapping[str, float] = field(default_factory=dict)
    """Of weights, before those of the common text model."""

    end_gain: float = END_GAIN
    head: str = "lm_head.weight"
    tied: str | None = None
    published: Callable[[Tensors], Tensors] = lambda tensors: tensors
    """The tensors as the published checkpoints have them."""

    files: Mapping[str, str] = field(default_factory=dict)
    """Further files of the folder: name and text."""

    max_positions: int = 32_768
    serving: Serving

    def tiny_model(self) -> TinyModel:
        """Return the entry of the table of families."""
        return TinyModel(self.write, self.serving)

    def write(self, directory: Path) -> None:
        """Write the model folder into `directory`, which exists."""
        from transformers import GenerationConfig

        tokens = (*self.special_tokens, *self.plain_tokens)
        vocabulary = train(self.vocabulary_tokens - len(tokens))
        tokenizer = self._tokenizer(vocabulary)
        config = self.config(id_of := tokenizer.convert_tokens_to_ids)
        end, *stops = map(id_of, (self.end, *self.stops))
        write_folder(
            directory,
            config=config,
            generation=GenerationConfig(
                eos_token_id=[end, *stops] if stops else end, pad_token_id=id_of(self.pad), **self.generation(id_of)
            ),
            processor=self.processor(tokenizer) or tokenizer,
            tensors=None if self.shapes is None else self._tensors(self.shapes(config), vocabulary.spoken(), end),
        )
        for name, text in self.files.items():
            (directory / name).write_text(text)

    def _tensors(self, shapes: Shapes, spoken: Sequence[int], end: int) -> Tensors:
        tensors = weights.fill(
            self.family,
            shapes,
            {**self.gains, **{name: gain for name, gain in GAINS.items() if name not in self.gains}},
            head=self.head,
            tied=self.tied,
            spoken=spoken,
            end=end,
            end_gain=self.end_gain,
        )
        return self.published(tensors)

    def _tokenizer(self, vocabulary: Vocabulary) -> Any:
        from tokenizers import AddedToken

        tokenizer: Any
        if self.own_tokenizer is not None:
            tokenizer = self.own_tokenizer(vocabulary)
        elif self.named_tokens is None:
            tokenizer = qwen2(vocabulary, self.special_tokens, self.max_positions)
        else:
            tokenizer = byte_level(vocabulary, self.special_tokens, self.max_positions, named=self.named_tokens)
        tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in self.plain_tokens])
        tokenizer.chat_template = self.chat_template
        return tokenizer


def write_folder(directory: Path, *, config: Any, generation: Any, processor: Any, tensors: Tensors | None) -> None:
    """Write all files of a model into `directory`, which exists.

    The part of `processor` that takes images or clips is written twice: the second copy is the
    `preprocessor_config.json` of published models. Where vLLM has the processor, `processor` is the tokenizer alone. A
    family that runs on no CPU has no tensors.
    """
    media = getattr(processor, "image_processor", None) or getattr(processor, "feature_extractor", None)
    for part in filter(None, (config, generation, processor, media)):
        part.save_pretrained(directory)
    if tensors is not None:
        weights.save(tensors, directory)
