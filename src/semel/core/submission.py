"""The input and output of an engine: values that any process can use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from semel.core.digest import Digest
from semel.core.embedding import PrefetchedOutput
from semel.core.feature import Feature
from semel.core.pooling import PoolingOutput
from semel.core.prompt import Prompt

__all__ = ["DEFAULT_WEIGHTS", "AnswerParsing", "Output", "PromptLogprob", "Submission", "Trace"]


class Trace(Struct, frozen=True, array_like=True):
    """The parent span of the work that follows."""

    parent: Annotated[str, Meta(pattern=r"^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\Z")]
    """W3C's `traceparent`: the trace, the span, and whether they are recorded."""

    state: Annotated[str, Meta(max_length=512)] = ""
    """W3C's `tracestate`: data that other tracing systems pass along."""

    @property
    def headers(self) -> dict[str, str]:
        """The trace as HTTP headers."""
        return {"traceparent": self.parent} | ({"tracestate": self.state} if self.state else {})


@dataclass(frozen=True, slots=True)
class AnswerParsing:
    """Settings for parsing the answer to a chat: the tool calls it may contain, and whether reasoning is separate."""

    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str | Mapping[str, Any] = "none"
    """`none`, `auto`, `required`, or the one function to call."""

    parallel_tool_calls: bool = True
    past_tool_calls: int = 0
    """Tool calls in the chat so far; some models continue the numbering of call ids."""

    response_format: Mapping[str, Any] | None = None
    include_reasoning: bool = True
    reasoning_effort: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template; some of them turn reasoning on or off."""

    stream: bool = False
    """True if the answer is parsed incrementally."""


DEFAULT_WEIGHTS: Final = "default"
"""The version of weights that nobody has named, as vLLM calls it."""

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
    """Sampling parameters under the engine's own names; pooling parameters, if `task` is one of them."""

    cache_salt: str | None = None
    """Separates the request's prefixes in the engine's prefix cache from those of other salts."""

    parsing: AnswerParsing | None = None
    """None for an answer of plain text."""

    priority: int = 0
    """A lower value runs earlier if the engine schedules by priority."""

    trace: Trace | None = None
    """The span that the request belongs to; None without tracing."""

    client_features: frozenset[Digest] = frozenset()
    """Items whose tensors the client sent. Their worker counts them as vLLM does; others count where they are rendered.
    """

    prefetched_outputs: tuple[PrefetchedOutput, ...] = ()
    """Encoder outputs that the worker has fetched for this request: the engine need not encode these items."""

    adapter: str | None = None
    """The name of the adapter that answers; None for the model as it is."""

    @property
    def pools(self) -> bool:
        """Return whether the answer is a pooling output instead of tokens."""
        return "task" in self.sampling


class Output(Struct, frozen=True):
    """The tokens that the engine generated since the last output.

    A struct, because there is one per token: creating it takes 0.4 µs, a dataclass takes 5.8.
    """

    index: int
    """The number of the sequence among the request's `n`."""

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

    weight_versions: tuple[tuple[str, int, int], ...] | None = None
    """The weights that sampled the tokens of the sequence: their version, the first token, and the one after the last.
    Set on the last output, unless they all are those of the start (`DEFAULT_WEIGHTS`)."""

    pooling: PoolingOutput | None = None
    """What was pooled, or a piece of it, of a submission that `pools`; then there is nothing else."""
