"""What goes into an engine and what comes out of it: values, whichever process has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from semel.core.answer_parsing import AnswerParsing
from semel.core.digest import Digest
from semel.core.feature import Feature
from semel.core.prompt import Prompt
from semel.core.trace import Trace

__all__ = ["Output", "PromptLogprob", "Submission"]

PromptLogprob = tuple[float, int | None, str | None]
"""The log probability of a token, its rank, and how it reads."""


@dataclass(frozen=True, slots=True)
class Submission:
    """One request to an engine."""

    request_id: str
    prompt: Prompt
    features: Mapping[Digest, Feature]
    """The features of the items that the engine may lack; every other item is referred to by its digest."""

    sampling: Mapping[str, object] = field(default_factory=dict)
    """Sampling parameters under the engine's own names."""

    cache_salt: str | None = None
    """Keeps the engine's prefix cache apart from that of other salts."""

    parsing: AnswerParsing | None = None
    """How the answer is read; None for one that is text and nothing else."""

    priority: int = 0
    """Lower is earlier, where the engine schedules by priority."""

    trace: Trace | None = None
    """Whose part it is, where requests are traced."""


class Output(Struct, frozen=True):
    """What was generated since the last output. A struct, for there is one per token: 0.4 µs, a dataclass takes 5.8."""

    index: int
    """Which of the request's `n` sequences."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...] | None = None
    """For each token, the log probabilities that were asked for, by token id."""

    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token that ended it, if one did."""

    texts: tuple[Mapping[int, str], ...] | None = None
    """For each token, how the tokens that have log probabilities read."""

    message: Mapping[str, Any] | None = None
    """What the parsers read, in OpenAI's shape: of a stream what to add to the message, maybe nothing yet; else the
    message, with the last output. None where no parser is used: then it is the text."""

    reasoning_tokens: int | None = None
    """How many of the sequence's tokens are reasoning: all of them with its last output. None if no parser tells."""

    cached_tokens: int | None = None
    """How many of the prompt's tokens were in the prefix cache, with the first output."""

    created_cache_tokens: int | None = None
    """How many were put into it, with the first output."""

    prompt_logprobs: tuple[Mapping[int, PromptLogprob] | None, ...] | None = None
    """For each token of the prompt, if asked for, with the first output."""
