"""Fields of vLLM's and OpenAI's requests that semel does not implement: those without effect, and those it refuses.

This module is the only place that has these lists. A test compares docs/api/routes.md with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import BaseModel, Field

from semel.errors import InvalidRequest
from semel.frontend.api.shared.unknown_fields import UnknownFields

__all__ = ["REFUSED", "Ignored", "tell_nulls", "tell_refused", "without_refused"]


_MAX_MEMBERS: Final = 4_096
"""Of a request, and of its sampling parameters: counted before a field is looked at. No API has so many fields."""

_Unread = Annotated[Any, Field(description="Accepted and not looked at.")]


class Ignored(BaseModel):
    """Accepted and not looked at: with a server of one's own they cannot change the answer."""

    guided_decoding_backend: _Unread = None
    metadata: _Unread = None
    prediction: _Unread = None
    prompt_cache_key: _Unread = None
    prompt_cache_retention: _Unread = None
    safety_identifier: _Unread = None
    service_tier: _Unread = None
    session_id: _Unread = None
    store: _Unread = None
    user: _Unread = None


REFUSED: Final[Mapping[str, tuple[tuple[object, ...], str]]] = {
    "add_special_tokens": ((False,), "the chat template writes the special tokens"),
    "audio": ((), "answers are text"),
    "best_of": ((1,), "ask for n answers and choose"),
    "chat_template": ((), "templates from clients are not run; the operator sets one with --chat-template"),
    "early_stopping": ((False,), "there is no beam search"),
    "echo": ((False,), "put the last message and the answer together"),
    "ec_transfer_params": ((), "where features travel is not a client's to say"),
    "function_call": (("none",), "use tool_choice"),
    "functions": (([],), "use tools"),
    "guided_choice": ((), "use structured_outputs"),
    "guided_grammar": ((), "use structured_outputs"),
    "guided_json": ((), "use structured_outputs"),
    "guided_regex": ((), "use structured_outputs"),
    "guided_whitespace_pattern": ((), "use structured_outputs"),
    "kv_transfer_params": ((), "where prefixes travel is not a client's to say"),
    "length_penalty": ((1, 1.0), "there is no beam search"),
    "mm_payload": (("tensors",), "ask for tensors with the header Accept: application/x-safetensors"),
    "modalities": ((["text"],), "answers are text"),
    "prompt_embeds": ((), "send text or tokens"),
    "return_mm_kwargs": ((), "ask for tensors with the header Accept: application/x-safetensors"),
    "return_prompt_text": ((False,), "/v1/chat/completions/render shows a prompt's tokens"),
    "return_token_offsets": ((False,), "/tokenize shows tokens without offsets"),
    "routed_experts_prompt_start": ((0,), "experts are not told"),
    "suffix": ((), "send what comes before alone"),
    "truncate_prompt_tokens": ((), "a cut could go through an item; send less"),
    "truncation_side": ((), "prompts are not cut"),
    "use_beam_search": ((False,), "ask for n answers"),
    "vllm_xargs": (({},), "arguments for plug-ins are the operator's to give"),
    "watermarking": ((False,), "it is the operator's to set"),
    "web_search_options": ((), "nothing is searched; offer a tool"),
}
"""Unsupported fields: the values that mean the same as leaving the field out, and what to do instead."""


def without_refused(
    body: Mapping[str, Any],
    known: frozenset[str],
    refused: Mapping[str, tuple[tuple[object, ...], str]] = REFUSED,
    unknown: UnknownFields | None = None,
) -> dict[str, Any]:
    """The body of a request without fields that have no effect. Those in `refused` are refused by name.

    A field in `known` is not changed, except that null means the same as leaving it out. `unknown` counts and judges
    the others; without it they are refused.
    """
    if len(body) > _MAX_MEMBERS:
        raise InvalidRequest(f"an object of the request has {len(body):,} members; the limit is {_MAX_MEMBERS:,}")
    if others := body.keys() - known:
        for name in (name for name in body if name in others and name in refused):
            value, (neutral, instead) = body[name], refused[name]
            if value is not None and not any(value == one and type(value) is type(one) for one in neutral):
                raise InvalidRequest.of(name, f"not supported: {instead}")
        unknown = UnknownFields() if unknown is None else unknown
        unknown.check([name for name in body if name in others and name not in refused], known, body.keys())
    return {name: value for name, value in body.items() if name in known and value is not None}


def tell_refused(schema: dict[str, Any], refused: Mapping[str, tuple[tuple[object, ...], str]] = REFUSED) -> None:
    """Describe in the schema of a request what `without_refused` does with it."""
    properties = schema["properties"]
    for name, (neutral, instead) in refused.items():
        values = [one for number, one in enumerate(neutral) if one not in neutral[:number]]
        properties.setdefault(name, {"enum": [None, *values], "description": f"Not supported: {instead}."})
    tell_nulls(schema)


def tell_nulls(schema: dict[str, Any]) -> None:
    """Describe in the schema that null means the same as leaving a field out."""
    for name, field_schema in schema["properties"].items():
        if name not in schema.get("required", ()) and not _takes_null(field_schema):
            about = {key: field_schema.pop(key) for key in ("default", "description") if key in field_schema}
            schema["properties"][name] = {"anyOf": [field_schema, {"type": "null"}], **about}


def _takes_null(schema: Mapping[str, Any]) -> bool:
    if "anyOf" in schema:
        return {"type": "null"} in schema["anyOf"]
    if schema.get("type") == "null" or None in schema.get("enum", ()):
        return True
    return not schema.keys() - {"default", "description"}  # it accepts every value
