"""The shapes of answers to text completions. Types only."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from semel.frontend.api.shapes.usage import PromptLogprob, StreamedUsage, Usage

__all__ = [
    "TextChoice",
    "TextChunkChoice",
    "TextCompletion",
    "TextCompletionChunk",
    "TextLogprobs",
]


class TextLogprobs(TypedDict):
    """Four lists with an entry for each token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TextChoice(TypedDict):
    """One of the `n` answers to a prompt."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None
    prompt_token_ids: list[int] | None
    routed_experts: None


class TextCompletion(TypedDict):
    """How prompts go on."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    service_tier: None
    system_fingerprint: str
    usage: Usage
    kv_transfer_params: None
    ec_transfer_params: None
    metrics: None


class TextChunkChoice(TypedDict):
    """More of one of the `n` answers to a prompt."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_token_ids: list[int] | None
    token_ids: list[int] | None


class TextCompletionChunk(TypedDict):
    """More of how prompts go on."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChunkChoice]
    system_fingerprint: NotRequired[str]
    usage: NotRequired[StreamedUsage]
