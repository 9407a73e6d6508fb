"""The input and output of an engine: values that any process can use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from semel.core.answer_parsing import AnswerParsing
from semel.core.digest import Digest
from semel.core.embedding import PrefetchedOutput
from semel.core.feature import Feature
from semel.core.prompt import Prompt
from semel.core.trace import Trace

__all__ = ["Output", "PromptLogprob", "Submission"]

PromptLogprob = tuple[float, int | None, str | None]
"""The log probability of a token, its rank, and its text."""


@dataclass(frozen=True, slots=True)
class Submission:
    """One request to an engine."""

    request_id: str
    prompt: Prompt
    features: Mapping[Digest, Feature]
    """Features of the items that the engine may lack. The prompt refers to every other item by its digest."""

    sampling: Mapping[str, object] = field(default_factory=dict)
    """Sampling parameters under the engine's own names."""

    cache_salt: str | None = None
    """Separates the request's prefixes in the engine's prefix cache from those of other salts."""

    parsing: AnswerParsing | None = None
    """How to parse the answer; None for plain text."""

    priority: int = 0
    """A lower value runs earlier if the engine schedules by priority."""

    trace: Trace | None = None
    """The span that the request belongs to; None without tracing."""

    client_features: frozenset[Digest] = frozenset()
    """Items whose tensors the client sent. Their worker counts them as vLLM does; others count where they are rendered.
    """

    prefetched_outputs: tuple[PrefetchedOutput, ...] = ()
    """Encoder outputs that the worker has fetched for this request: the engine need not encode these items."""


class Output(Struct, frozen=True):
    """What the engine generated since the last output.

    A struct, because there is one per token: creating it takes 0.4 µs, a dataclass takes 5.8.
    """

    index: int
    """Which of the request's `n` sequences."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...] | None = None
    """For each token, the requested log probabilities by token id."""

    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token that ended the sequence, if any."""

    texts: tuple[Mapping[int, str], ...] | None = None
    """For each token, the text of every token that has a log probability."""

    message: Mapping[str, Any] | None = None
    """The parsers' result, in OpenAI's shape. In a stream: the delta of the message, possibly empty. Otherwise: the
    message, with the last output. None without a parser; the text is then the message."""

    reasoning_tokens: int | None = None
    """Number of reasoning tokens in the sequence, complete with its last output. None if no parser counts them."""

    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache; set on the first output."""

    created_cache_tokens: int | None = None
    """Prompt tokens added to the prefix cache; set on the first output."""

    prompt_logprobs: tuple[Mapping[int, PromptLogprob] | None, ...] | None = None
    """For each token of the prompt, if requested; set on the first output."""
