"""Rendered prompts in JSON, in the shape of vLLM's render routes, plus the embedding masks that vLLM omits. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from typing_extensions import TypedDict

from semel.core import Modality, Placeholder, Prompt

__all__ = [
    "PROMPT",
    "Detokenized",
    "RenderedFeatures",
    "RenderedPlace",
    "RenderedPrompt",
    "Tokenized",
    "features_body",
    "generate_body",
    "places_of",
    "tokens_body",
]

PROMPT: Final = "generate"
"""The metadata key of a prompt, as JSON, in the file that has its tensors."""


class RenderedPlace(TypedDict):
    """Where an item sits in a prompt, and which of its tokens are embeddings; null: all of them."""

    offset: int
    length: int
    is_embed: list[bool] | None


class RenderedFeatures(TypedDict):
    """The items of a prompt by modality: digests, places, and tags that say whose they are."""

    mm_hashes: dict[Modality, list[str]]
    mm_placeholders: dict[Modality, list[RenderedPlace]]
    mm_tags: dict[Modality, list[str]]
    kwargs_data: None
    mm_metadata: None


class RenderedPrompt(TypedDict):
    """A prompt that `/inference/v1/generate` takes."""

    request_id: str
    token_ids: Sequence[int]
    token_offsets: None
    features: RenderedFeatures | None
    content_parts: None
    sampling_params: Mapping[str, Any]
    model: str
    reasoning_ended: None
    reasoning_parser_kwargs: None
    return_token_ids: None
    output_mode: Literal["tokens"]
    stream: bool
    stream_options: Mapping[str, bool | None] | None
    cache_salt: str | None
    priority: int
    kv_transfer_params: None
    ec_transfer_params: None


class Tokenized(TypedDict):
    """A text or a chat in tokens."""

    count: int
    max_model_len: int
    tokens: Sequence[int]
    token_strs: Sequence[str] | None


class Detokenized(TypedDict):
    """Tokens as text."""

    prompt: str


def generate_body(
    prompt: Prompt,
    *,
    request_id: str,
    model: str,
    sampling: Mapping[str, object],
    stream: bool,
    stream_options: Mapping[str, bool | None] | None,
    cache_salt: str | None,
) -> RenderedPrompt:
    """The body of `/inference/v1/generate` for a prompt. It names the items by digest and has no tensors."""
    return {
        "request_id": request_id,
        "token_ids": prompt.token_ids,
        "token_offsets": None,
        "features": features_body(prompt),
        "content_parts": None,
        "sampling_params": sampling,
        "model": model,
        "reasoning_ended": None,
        "reasoning_parser_kwargs": None,
        "return_token_ids": None,
        "output_mode": "tokens",
        "stream": stream,
        "stream_options": stream_options if stream else None,
        "cache_salt": cache_salt,
        "priority": 0,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }


def features_body(prompt: Prompt) -> RenderedFeatures | None:
    """The items of a prompt by modality, if any: their digests and positions. `ownership` adds the tags."""
    if not prompt.items:
        return None
    hashes: dict[Modality, list[str]] = {}
    for item in prompt.items:
        hashes.setdefault(item.modality, []).append(item.digest.hex())
    return {
        "mm_hashes": hashes,
        "mm_placeholders": places_of(prompt),
        "kwargs_data": None,
        "mm_metadata": None,
        "mm_tags": {},
    }


def places_of(prompt: Prompt) -> dict[Modality, list[RenderedPlace]]:
    """The positions of a prompt's items, by modality."""
    places: dict[Modality, list[RenderedPlace]] = {}
    for item, placeholder in zip(prompt.items, prompt.timeline, strict=True):
        places.setdefault(item.modality, []).append(_place(placeholder))
    return places


def tokens_body(token_ids: Sequence[int], max_tokens: int, token_strs: Sequence[str] | None = None) -> Tokenized:
    """The response of `/tokenize`."""
    return {"count": len(token_ids), "max_model_len": max_tokens, "tokens": token_ids, "token_strs": token_strs}


def _place(placeholder: Placeholder) -> RenderedPlace:
    mask = placeholder.mask
    is_embed = None if mask is None else [bool(bit) for bit in mask.bits]
    return {"offset": placeholder.offset, "length": placeholder.length, "is_embed": is_embed}
