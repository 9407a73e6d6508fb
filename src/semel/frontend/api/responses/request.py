"""A request of OpenAI's Responses API, and the chat that it is. Pure.

The chat is that of the request's own items. What it continues is put before them when it has been read (`stored`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Final, Literal, cast

from msgspec import Raw
from pydantic import AfterValidator, Field, TypeAdapter, WithJsonSchema
from typing_extensions import TypedDict

from semel.errors import InvalidRequest
from semel.frontend.api.openai.structured_outputs import StructuredOutputs
from semel.frontend.api.openai.translation import ClientTerms, Translated, to_chat
from semel.frontend.api.responses.input import CUSTOM_INPUT, continues_last, input_messages
from semel.frontend.api.shared.fields import REFUSED
from semel.frontend.api.shared.request_base import (
    Biases,
    Effort,
    Int64,
    OpenModel,
    OwnedRequest,
    RequestName,
    StrictModel,
    Tokens,
    Top,
    Unread,
    Words,
)
from semel.render.media.json_values import object_of, string_of

__all__ = [
    "RESPONSES_REFUSED",
    "TRANSLATED_RESPONSES",
    "Reasoning",
    "ResponsesEcho",
    "ResponsesRequest",
    "ResponsesStreamOptions",
    "TextOptions",
    "Turn",
]

RESPONSES_REFUSED: Final[Mapping[str, tuple[tuple[object, ...], str]]] = {
    **REFUSED,
    "background": ((False,), "nothing is generated without a client; send it with stream, and read it as it comes"),
    "context_management": (([],), "nothing is compacted; send fewer items"),
    "conversation": ((), "there are no such objects; send the whole conversation as input, or previous_response_id"),
    "enable_response_messages": ((False,), "/v1/chat/completions/render shows a prompt's tokens"),
    "moderation": ((), "nothing is moderated; ask a model for it"),
    "previous_input_messages": (([],), "send the whole conversation as input"),
    "prompt": ((), "there are no stored prompts; send its text as instructions"),
    "truncation": (("disabled",), "prompts are not cut; send fewer items"),
}
"""Fields that are refused by name, as in `REFUSED`."""

_MAX_ECHO_CHARS: Final = 32_768
"""A field of a request with more characters of JSON is not repeated in its answer, which stays in memory meanwhile."""

_FIELDS: Final[Mapping[str, str]] = {
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
}
_SAME: Final = (
    *("cache_salt", "chat_template_kwargs", "frequency_penalty", "ignore_eos", "include_reasoning"),
    *("include_stop_str_in_output", "logit_bias", "media_io_kwargs", "min_p", "mm_processor_kwargs", "model"),
    *("parallel_tool_calls", "presence_penalty", "priority", "repetition_penalty", "request_id", "seed"),
    *("skip_special_tokens", "stop"),
    *("return_media_ids", "stop_token_ids", "stream", "structured_outputs", "temperature", "top_k", "top_p"),
)
"""Fields that a chat has under the same name."""

_FORMAT_FIELDS: Final = ("type", "name", "description", "schema", "strict")
_ECHOED: Final = (
    *("frequency_penalty", "max_output_tokens", "parallel_tool_calls", "presence_penalty", "prompt_cache_key"),
    *("previous_response_id", "safety_identifier", "temperature", "top_logprobs", "top_p", "user"),
)
"""Fields that the answer has under the same name, with the same value."""

_LOGPROBS: Final = "message.output_text.logprobs"
_Item = Annotated[dict[str, Any], WithJsonSchema({"type": "object"})]
_Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class Reasoning(OpenModel):
    """How much to think. Reasoning is answered as it is, so there is no summary to ask for."""

    effort: Effort | None = None


class TextOptions(OpenModel):
    """What the text of the answer is held to."""

    format: dict[str, Any] | None = None


class ResponsesStreamOptions(StrictModel):
    """OpenAI's padding that hides the size of tokens from a network observer. semel does not pad."""

    include_obfuscation: bool | None = None


class ResponsesRequest(OwnedRequest):
    """The items of a conversation, and how to answer."""

    refused: ClassVar[Mapping[str, tuple[tuple[object, ...], str]]] = RESPONSES_REFUSED

    input: str | Annotated[list[_Item], Field(fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Tokens | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=1_024)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: Annotated[list[Words], Field(max_length=32)] | None = None
    top_logprobs: Top = 0
    stream: bool = False
    stream_options: ResponsesStreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    metadata: _Metadata | None = None
    store: bool | None = None
    previous_response_id: Words | None = None
    user: Words | None = None
    safety_identifier: Words | None = None
    prompt_cache_key: Words | None = None
    access_programs: Unread = None
    client_metadata: Unread = None
    max_tool_calls: Unread = None
    prompt_cache_options: Unread = None
    prompt_cache_retention: Unread = None
    service_tier: Unread = None
    session_id: Unread = None

    chat_template_kwargs: dict[str, Any] | None = None
    frequency_penalty: float | None = None
    ignore_eos: bool | None = None
    include_reasoning: bool = True
    include_stop_str_in_output: bool | None = None
    logit_bias: Biases | None = None
    media_io_kwargs: dict[str, Any] | None = None
    min_p: float | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    presence_penalty: float | None = None
    priority: Int64 = 0
    repetition_penalty: float | None = None
    request_id: RequestName | None = None
    return_media_ids: bool = False
    seed: Int64 | None = None
    skip_special_tokens: bool | None = None
    stop: Words | Annotated[list[Words], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[Int64], Field(max_length=128)] | None = None
    structured_outputs: StructuredOutputs | None = None
    top_k: Int64 | None = None


@dataclass(slots=True)
class Turn:
    """What storing and continuing need of a request."""

    input: str | list[dict[str, Any]] | None
    """Until it is clear that it is not stored, or it is: it has the media."""

    previous_response_id: str | None
    is_stored: bool
    """False if the client does not want it."""


@dataclass(frozen=True, slots=True)
class ResponsesEcho:
    """The fields of a request that its answer repeats, and the names of its custom tools."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    """By their names in the answer. Those that may be long are JSON already."""

    effort: str | None = None
    custom_tools: frozenset[str] = frozenset()
    turn: Turn = field(default_factory=lambda: Turn(None, None, is_stored=False))


_CUSTOM_PARAMETERS: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}
"""The parameters of the function that a custom tool becomes, in vLLM's words."""


class _ChatTool(TypedDict):
    type: Literal["function"]
    function: dict[str, Any]


def _translate(request: ResponsesRequest) -> Translated[ResponsesEcho]:
    """The chat that a request is."""
    made = input_messages(request.instructions, request.input)
    logprobs = request.include is not None and _LOGPROBS in request.include
    fields: dict[str, Any] = {name: getattr(request, name) for name in _SAME}
    fields |= {
        "messages": made.messages,
        "max_completion_tokens": request.max_output_tokens,
        "tools": [_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools or ())] or None,
        "tool_choice": _tool_choice(request),
        "response_format": _response_format(request.text),
        "reasoning_effort": None if request.reasoning is None else request.reasoning.effort,
        "logprobs": logprobs or None,
        "top_logprobs": request.top_logprobs if logprobs else None,
        "stream_options": {"include_usage": True} if request.stream else None,
    }
    if continues_last(request.input):
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    # What is repeated is encoded after the chat is made, which has refused what is too long.
    return to_chat(fields, partial(_echo, request), ClientTerms(_FIELDS, tuple(made.places)))


TRANSLATED_RESPONSES: Final = cast(
    "TypeAdapter[Translated[ResponsesEcho]]", TypeAdapter(Annotated[ResponsesRequest, AfterValidator(_translate)])
)
"""Reads a request, and translates it."""


def _tool(tool: dict[str, Any], where: str) -> _ChatTool:
    match tool.get("type"):
        case "function":
            return {"type": "function", "function": {name: one for name, one in tool.items() if name != "type"}}
        case "custom":
            if object_of(tool.get("format") or {}, f"{where}.format").get("type", "text") != "text":
                raise InvalidRequest.of(f"{where}.format", "a custom tool takes any text; leave the grammar out")
            function = {"name": tool.get("name"), "description": tool.get("description")}
            return {"type": "function", "function": {**function, "parameters": _CUSTOM_PARAMETERS}}
        case kind:
            raise InvalidRequest.of(
                where, f"type {str(kind)[:32]!r} is not supported: no tools run here; offer a function, and run it"
            )


def _tool_choice(request: ResponsesRequest) -> str | dict[str, Any] | None:
    choice = request.tool_choice
    if choice is None or (choice == "auto" and not request.tools):
        return None
    if isinstance(choice, str):
        return choice
    if choice.get("type") in ("function", "custom"):
        name = string_of(choice.get("name"), "tool_choice.name")
        return {"type": "function", "function": {"name": name}}
    raise InvalidRequest.of("tool_choice", "must be none, auto, required, or an object with the name of a function")


def _response_format(text: TextOptions | None) -> dict[str, Any] | None:
    form = None if text is None else text.format
    if form is None or form.get("type") == "text":
        return None
    if form.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {name: one for name, one in form.items() if name != "type"}}
    return form


def _echo(request: ResponsesRequest) -> ResponsesEcho:
    tools = request.tools or []
    form = None if request.text is None else request.text.format
    text = None if form is None else {"format": {name: form[name] for name in _FORMAT_FIELDS if name in form}}
    choice = request.tool_choice
    if isinstance(choice, dict):
        choice = {"type": choice["type"], "name": choice["name"]}
    encoded = {
        "instructions": _encoded(request.instructions),
        "tools": _encoded([_complete(tool) for tool in tools]) or Raw(b"[]"),
        "tool_choice": _encoded(choice) or Raw(b'"auto"'),
        "text": _encoded(text),
        "metadata": request.metadata or {},
    }
    return ResponsesEcho(
        {name: getattr(request, name) for name in _ECHOED} | encoded,
        None if request.reasoning is None else request.reasoning.effort,
        frozenset(str(tool.get("name")) for tool in tools if tool.get("type") == "custom"),
        Turn(request.input, request.previous_response_id, is_stored=request.store is not False),
    )


def _encoded(value: object) -> Raw | None:
    """The JSON of a value; None if it is long, or if JSON has no such number."""
    if value is None or (isinstance(value, str) and len(value) > _MAX_ECHO_CHARS):
        return None
    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError:
        return None
    return Raw(text.encode()) if len(text) <= _MAX_ECHO_CHARS else None


def _complete(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool with the fields that OpenAI's answers always have."""
    return {"parameters": None, "strict": None, **tool} if tool.get("type") == "function" else tool
