"""The shapes of prompts and answers in tokens. Types only."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from semel.core import Modality
from semel.frontend.api.shapes.usage import PromptLogprob, StreamedUsage, Usage

__all__ = [
    "Detokenized",
    "Generated",
    "GeneratedChoice",
    "GeneratedChunk",
    "RankedLogprob",
    "RenderedFeatures",
    "RenderedPlace",
    "RenderedPrompt",
    "TokenIdLogprob",
    "TokenIdLogprobs",
    "Tokenized",
]


class RenderedPlace(TypedDict):
    """Where an item sits in a prompt, and which of its tokens are embeddings; null: all of them."""

    offset: int
    length: int
    is_embed: list[bool] | None


class RankedLogprob(TypedDict):
    """One of the likeliest tokens, by its id."""

    token_id: int
    logprob: float
    rank: None


class TokenIdLogprob(TypedDict):
    """A token by its id, and the likeliest in its place."""

    token_id: int
    logprob: float
    rank: None
    top_logprobs: list[RankedLogprob]


class TokenIdLogprobs(TypedDict):
    """One entry for each token."""

    content: list[TokenIdLogprob]


class RenderedFeatures(TypedDict):
    """The items of a prompt by modality: digests, places, and tags that say whose they are."""

    mm_hashes: dict[Modality, list[str]]
    mm_placeholders: dict[Modality, list[RenderedPlace]]
    mm_tags: dict[Modality, list[str]]
    kwargs_data: None
    mm_metadata: None


class GeneratedChoice(TypedDict):
    """One of the `n` answers, or more of it, in tokens."""

    index: int
    logprobs: TokenIdLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int]
    routed_experts: None
    sampling_mask: None
    weight_versions: None


class Generated(TypedDict):
    """How a rendered prompt goes on, in tokens."""

    request_id: str
    model: str
    created: int
    usage: Usage
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None
    prompt_token_id_logprobs: None
    prompt_token_ids: list[int] | None
    mm_placeholders: dict[Modality, list[RenderedPlace]] | None
    metrics: None
    kv_transfer_params: None
    ec_transfer_params: None
    features: NotRequired[RenderedFeatures]
    output_mode: Literal["tokens"]
    choices: list[GeneratedChoice]


class GeneratedChunk(TypedDict):
    """More of how a rendered prompt goes on, in tokens."""

    request_id: str
    usage: StreamedUsage | None
    prompt_token_ids: NotRequired[list[int]]
    mm_placeholders: NotRequired[dict[Modality, list[RenderedPlace]] | None]
    features: NotRequired[RenderedFeatures]
    output_mode: Literal["tokens"]
    choices: list[GeneratedChoice]


class RenderedPrompt(TypedDict):
    """A prompt that `/inference/v1/generate` takes."""

    request_id: str
    token_ids: list[int]
    token_offsets: None
    features: RenderedFeatures | None
    content_parts: None
    sampling_params: dict[str, Any]
    model: str
    reasoning_ended: None
    reasoning_parser_kwargs: None
    return_token_ids: None
    output_mode: Literal["tokens"]
    stream: bool
    stream_options: dict[str, bool | None] | None
    cache_salt: str | None
    priority: int
    kv_transfer_params: None
    ec_transfer_params: None


class Tokenized(TypedDict):
    """A text or a chat in tokens."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: None


class Detokenized(TypedDict):
    """Tokens as text."""

    prompt: str
