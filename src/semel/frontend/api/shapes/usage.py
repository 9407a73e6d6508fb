"""What an answer cost, as the OpenAPI document tells it. Types only."""

from __future__ import annotations

from typing import NotRequired

from typing_extensions import TypedDict

from semel.core import Modality

__all__ = [
    "CompletionTokensDetails",
    "PromptLogprob",
    "PromptTokensDetails",
    "StreamedUsage",
    "Usage",
]


class PromptTokensDetails(TypedDict):
    """Which tokens of a prompt."""

    cached_tokens: NotRequired[int | None]
    created_cache_tokens: NotRequired[int | None]
    multimodal_tokens: NotRequired[dict[Modality, int] | None]
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


class PromptLogprob(TypedDict):
    """The log probability of one token at a place of a prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None
