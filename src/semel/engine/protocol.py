"""What semel asks of an engine, and the values that go in and out.

An engine gets prompts that are rendered and features that are preprocessed; it never sees a URL, a message or a pixel
that semel has not checked. The one implementation is `semel.engine.vllm`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from semel.core import Contract, Digest, Feature, Prompt

__all__ = ["Engine", "Output", "Stream", "Submission"]


@dataclass(frozen=True, slots=True)
class Submission:
    """One request to an engine."""

    request_id: str
    prompt: Prompt
    features: Mapping[Digest, Feature]
    """The feature of every item of the prompt."""

    sampling: Mapping[str, object] = field(default_factory=dict)
    """Sampling parameters under the engine's own names."""

    cache_salt: str | None = None
    """Keeps the engine's prefix cache apart from that of other salts."""


@dataclass(frozen=True, slots=True)
class Output:
    """What was generated since the last output."""

    index: int
    """Which of the request's `n` sequences."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...] | None = None
    """For each token, the log probabilities that were asked for, by token id."""

    finish_reason: str | None = None


class Stream(Protocol):
    """The answer to a submission, as it is generated. Whoever has one closes it."""

    def __aiter__(self) -> AsyncIterator[Output]:
        """The outputs, until the last one has a finish reason for every sequence."""
        ...

    async def close(self) -> None:
        """Abort the request, unless its answer is complete."""
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

    async def submit(self, submission: Submission) -> Stream:
        """Check a submission and hand it to the engine, which needs it no more when this returns."""
        ...

    async def reset(self) -> None:
        """Forget all cached items, embeddings and prefixes."""
        ...

    async def close(self) -> None:
        """End the engine and its processes."""
        ...
