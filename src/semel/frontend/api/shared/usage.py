"""Token usage in OpenAI's shape: the tokens of the prompt and of the answer, with details."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NotRequired, Self

from typing_extensions import TypedDict

from semel.core import Modality, Output, Prompt

__all__ = [
    "CompletionTokensDetails",
    "PromptTokensDetails",
    "StreamedUsage",
    "Usage",
    "UsageCounter",
    "modality_tokens",
]


class PromptTokensDetails(TypedDict):
    """Which tokens of a prompt."""

    cached_tokens: NotRequired[int | None]
    created_cache_tokens: NotRequired[int | None]
    multimodal_tokens: NotRequired[Mapping[Modality, int] | None]
    audio_tokens: NotRequired[int]


class CompletionTokensDetails(TypedDict):
    """Which tokens of an answer."""

    reasoning_tokens: int


class Usage(TypedDict):
    """What an answer cost."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None


class StreamedUsage(TypedDict):
    """What an answer has cost so far."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: NotRequired[PromptTokensDetails | None]
    completion_tokens_details: NotRequired[CompletionTokensDetails | None]


def modality_tokens(prompt: Prompt) -> dict[Modality, int]:
    """The number of a prompt's tokens that belong to items, by modality."""
    counts: dict[Modality, int] = {}
    for item, placeholder in zip(prompt.items, prompt.timeline, strict=True):
        counts[item.modality] = counts.get(item.modality, 0) + placeholder.length
    return counts


@dataclass(slots=True)
class UsageCounter:
    """Counts the tokens of a response."""

    prompt_tokens: int
    multimodal_tokens: Mapping[Modality, int] = field(default_factory=dict)
    completion_tokens: int = 0
    cached_tokens: int | None = None
    created_cache_tokens: int | None = None
    reasoning_tokens: int | None = None

    @classmethod
    def of(cls, prompt: Prompt) -> Self:
        """A counter for the answer to a prompt."""
        encoded = 0 if prompt.encoder_token_ids is None else len(prompt.encoder_token_ids)
        return cls(len(prompt.token_ids) + encoded, modality_tokens(prompt) if prompt.items else {})

    def add(self, output: Output) -> None:
        """Count an output's tokens, and what the engine reports about the prompt."""
        self.completion_tokens += len(output.token_ids)
        if output.cached_tokens is not None:
            self.cached_tokens = (self.cached_tokens or 0) + output.cached_tokens
        if output.created_cache_tokens is not None:
            self.created_cache_tokens = (self.created_cache_tokens or 0) + output.created_cache_tokens
        if output.reasoning_tokens is not None:
            self.reasoning_tokens = (self.reasoning_tokens or 0) + output.reasoning_tokens

    def running(self, completion_tokens: int) -> StreamedUsage:
        """The usage of one choice that has `completion_tokens` tokens: three numbers."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
        }

    def whole(self) -> Usage:
        """The usage with its details. An unknown detail is null."""
        prompt: PromptTokensDetails = {
            "cached_tokens": self.cached_tokens,
            "created_cache_tokens": self.created_cache_tokens,
            "multimodal_tokens": self.multimodal_tokens or None,
        }
        if "audio" in self.multimodal_tokens:
            prompt["audio_tokens"] = self.multimodal_tokens["audio"]  # OpenAI's name for it
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": prompt,
            "completion_tokens_details": self.completion_details(),
        }

    def known(self) -> StreamedUsage:
        """The usage without unknown details, for the end of a stream."""
        prompt: PromptTokensDetails = {}
        if self.cached_tokens is not None:
            prompt["cached_tokens"] = self.cached_tokens
        if self.created_cache_tokens is not None:
            prompt["created_cache_tokens"] = self.created_cache_tokens
        if self.multimodal_tokens:
            prompt["multimodal_tokens"] = self.multimodal_tokens
        if "audio" in self.multimodal_tokens:
            prompt["audio_tokens"] = self.multimodal_tokens["audio"]
        usage = self.running(self.completion_tokens)
        usage["prompt_tokens_details"] = prompt
        if (details := self.completion_details()) is not None:
            usage["completion_tokens_details"] = details
        return usage

    def completion_details(self) -> CompletionTokensDetails | None:
        """The details of the answer's tokens; None if no parser counts them."""
        return None if self.reasoning_tokens is None else {"reasoning_tokens": self.reasoning_tokens}
