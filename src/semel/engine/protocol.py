"""What semel asks of an engine, and the values that go in and out.

An engine gets prompts that are rendered and features that are preprocessed; it never sees a URL, a message or a pixel
that semel has not checked. An engine keeps items in a cache of its own and tells what it holds; an item that it holds
is referred to by its digest. The one implementation is `semel.engine.vllm`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import Struct

from semel.core import Contract, Dialogue, Digest, Feature, Holding, Prompt, Trace

__all__ = ["Engine", "HoldingWatcher", "Output", "PromptLogprob", "Stream", "Submission"]


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

    dialogue: Dialogue | None = None
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


class Stream(Protocol):
    """The answer to a submission, as it is generated. Whoever has one closes it."""

    def __aiter__(self) -> AsyncIterator[Output]:
        """The outputs, until the last one has a finish reason for every sequence.

        Raises `FeatureMissing` before the first of them if items that went by reference were not there after all: the
        submission can be made again, with their features.
        """
        ...

    async def close(self) -> None:
        """Abort the request, unless its answer is complete."""
        ...


class HoldingWatcher(Protocol):
    """Is told what an engine's item cache holds: every insertion and every removal, in order, as it happens."""

    def hold(self, digest: Digest, holding: Holding) -> None:
        """The item is held from now on."""
        ...

    def drop(self, digest: Digest) -> None:
        """The item is gone."""
        ...


class Engine(Protocol):
    """Generates text from submissions.

    Every method may be called from any task of one event loop. A submission that breaks the contract is refused with
    `FeatureRejected` and leaves no trace in the engine.
    """

    @property
    def contract(self) -> Contract:
        """What this engine expects."""
        ...

    def holds(self, digest: Digest) -> bool:
        """Whether the engine's item cache holds the item, as far as this process knows."""
        ...

    def holding(self, digest: Digest) -> Holding | None:
        """What is known of an item that is held."""
        ...

    def watch(self, watcher: HoldingWatcher) -> None:
        """Tell the watcher of everything that is held, and from now on of every change."""
        ...

    async def submit(self, submission: Submission) -> Stream:
        """Check a submission and hand it to the engine, which needs it no more when this returns.

        Raises `FeatureMissing` if an item without a feature is not held or could not stay until its turn; nothing has
        changed then.
        """
        ...

    async def inject(self, digest: Digest, feature: Feature) -> bool:
        """Put an item into the engine's item cache, without a request.

        False if it was held already, does not fit, or there is no cache. A feature that breaks the contract is refused
        with `FeatureRejected`.
        """
        ...

    async def reset(self) -> None:
        """Forget all cached items, embeddings and prefixes. Requests in flight are answered."""
        ...

    async def close(self) -> None:
        """End the engine and its processes."""
        ...
