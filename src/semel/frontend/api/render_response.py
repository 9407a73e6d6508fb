"""Prompts in JSON, as vLLM's routes for rendering show them, with the embedding masks that those leave out. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from semel.core import Placeholder, Prompt

__all__ = ["PROMPT", "features_body", "generate_body", "tokens_body"]


PROMPT: Final = "generate"
"""Under this name a prompt goes in the metadata of the file that has its tensors, in JSON."""


def generate_body(
    prompt: Prompt,
    *,
    request_id: str,
    model: str,
    sampling: Mapping[str, object],
    stream: bool,
    stream_options: Mapping[str, object] | None,
    cache_salt: str | None,
) -> Mapping[str, Any]:
    """What `/inference/v1/generate` takes for a prompt: its items are named by digest, their tensors are elsewhere."""
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


def features_body(prompt: Prompt) -> Mapping[str, Any] | None:
    """The items of a prompt by modality: digests, and where each sits; None if there are none."""
    if not prompt.items:
        return None
    hashes: dict[str, list[str]] = {}
    placeholders: dict[str, list[Mapping[str, Any]]] = {}
    for item, placeholder in zip(prompt.items, prompt.timeline, strict=True):
        hashes.setdefault(item.modality, []).append(item.digest.hex())
        placeholders.setdefault(item.modality, []).append(_place(placeholder))
    return {"mm_hashes": hashes, "mm_placeholders": placeholders, "kwargs_data": None, "mm_metadata": None}


def tokens_body(token_ids: Sequence[int], max_tokens: int) -> Mapping[str, Any]:
    """What `/tokenize` answers."""
    return {"count": len(token_ids), "max_model_len": max_tokens, "tokens": token_ids, "token_strs": None}


def _place(placeholder: Placeholder) -> Mapping[str, Any]:
    mask = placeholder.mask
    is_embed = None if mask is None else [bool(bit) for bit in mask.bits]
    return {"offset": placeholder.offset, "length": placeholder.length, "is_embed": is_embed}
