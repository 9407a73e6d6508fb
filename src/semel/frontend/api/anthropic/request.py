"""A request of Anthropic's Messages API, and the chat that it is. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, cast

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, WithJsonSchema

from semel.errors import InvalidRequest
from semel.frontend.api.anthropic.input import continues_last, messages_input
from semel.frontend.api.openai.translation import ClientTerms, Translated, to_chat
from semel.frontend.api.shared.fields import REFUSED
from semel.frontend.api.shared.request_base import Effort, Int64, OpenModel, OwnedRequest, Tokens, Unread, Words
from semel.render.media.json_values import object_of, string_of

__all__ = [
    "MESSAGES_REFUSED",
    "TRANSLATED_COUNT",
    "TRANSLATED_MESSAGES",
    "CountTokensRequest",
    "ImageNumbers",
    "MessagesRequest",
    "MessagesTool",
    "MessagesToolChoice",
    "OutputConfig",
    "OutputFormat",
    "Thinking",
]

MESSAGES_REFUSED: Final[Mapping[str, tuple[tuple[object, ...], str]]] = {
    **REFUSED,
    "container": ((), "nothing runs here; offer a tool, and run it"),
    "media_io_kwargs": (({},), "it is for videos, which a message here does not have"),
    "mcp_servers": (([],), "nothing runs here; offer the server's tools, and call them"),
}
"""Fields that are refused by name, as in `REFUSED`."""

_FIELDS: Final[Mapping[str, str]] = {
    "max_completion_tokens": "max_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
}
ImageNumbers = tuple[int, ...]
"""Of each image in the chat, its number in the request: the chat has those in the results of tools first."""

_CHOICES: Final[Mapping[str, str]] = {"auto": "auto", "any": "required", "none": "none"}
_Message = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "role": {"enum": ["user", "assistant", "system"]},
                "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
            },
            "required": ["role", "content"],
        }
    ),
]


class Thinking(OpenModel):
    """Whether to think, and for how many tokens."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Tokens | None = None


class OutputFormat(OpenModel):
    """The JSON schema that the answer is held to."""

    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True)

    type: Literal["json_schema"] = "json_schema"
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")


class OutputConfig(OpenModel):
    """How much to think, and what the answer is held to."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class MessagesTool(OpenModel):
    """A tool of the client."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class MessagesToolChoice(OpenModel):
    """Which tool the answer may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountTokensRequest(OwnedRequest):
    """A conversation whose tokens are counted."""

    refused: ClassVar[Mapping[str, tuple[tuple[object, ...], str]]] = MESSAGES_REFUSED

    messages: Annotated[list[_Message], Field(fail_fast=True, min_length=1)]
    system: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=1_024)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    betas: Unread = None
    cache_control: Unread = None
    context_management: Unread = None
    speed: Unread = None


class MessagesRequest(CountTokensRequest):
    """A conversation, and how to answer."""

    max_tokens: Tokens
    stop_sequences: Annotated[list[Words], Field(max_length=16)] | None = None
    stream: bool = False
    temperature: float | None = None
    top_k: Int64 | None = None
    top_p: float | None = None
    priority: Int64 = 0
    return_media_ids: bool = False
    diagnostics: Unread = None
    inference_geo: Unread = None
    metadata: Unread = None
    service_tier: Unread = None
    user_profile_id: Unread = None
    workspace_id: Unread = None


def _translate(request: MessagesRequest) -> Translated[ImageNumbers]:
    """The chat that a request is."""
    thinking = request.thinking
    names = ("priority", "return_media_ids", "stream", "temperature", "top_k", "top_p")
    fields: dict[str, Any] = {name: getattr(request, name) for name in names}
    fields |= {
        "max_completion_tokens": request.max_tokens,
        "stop": request.stop_sequences or None,
        "response_format": _response_format(request),
        "tool_choice": _tool_choice(request),
        "thinking_token_budget": None if thinking is None else thinking.budget_tokens,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True} if request.stream else None,
    }
    if request.tool_choice is not None and request.tool_choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return _chat(request, fields)


def _translate_count(request: CountTokensRequest) -> Translated[ImageNumbers]:
    """The chat whose tokens are counted."""
    return _chat(request, {})


TRANSLATED_MESSAGES: Final = cast(
    "TypeAdapter[Translated[ImageNumbers]]", TypeAdapter(Annotated[MessagesRequest, AfterValidator(_translate)])
)
TRANSLATED_COUNT: Final = cast(
    "TypeAdapter[Translated[ImageNumbers]]",
    TypeAdapter(Annotated[CountTokensRequest, AfterValidator(_translate_count)]),
)
"""These read a request, and translate it."""


def _chat(request: CountTokensRequest, fields: dict[str, Any]) -> Translated[ImageNumbers]:
    """The chat of a request: what decides its prompt, and other fields."""
    made = messages_input(request.system, request.messages)
    names = ("cache_salt", "chat_template_kwargs", "mm_processor_kwargs", "model")
    fields |= {name: getattr(request, name) for name in names}
    fields |= {
        "messages": made.messages,
        "tools": _tools(request.tools or ()) or None,
        "reasoning_effort": _effort(request),
    }
    if continues_last(request.messages):
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    return to_chat(fields, lambda: tuple(made.numbers), ClientTerms(_FIELDS, tuple(made.places)))


def _tools(tools: Sequence[MessagesTool]) -> list[dict[str, Any]]:
    made = []
    for index, tool in enumerate(tools):
        if tool.type not in (None, "custom") or tool.input_schema is None:
            raise InvalidRequest.of(
                f"tools[{index}]", "only tools that the client runs, with a name and an input_schema, are supported"
            )
        function: dict[str, Any] = {"name": tool.name, "description": tool.description, "strict": tool.strict}
        parameters = {**tool.input_schema, "type": tool.input_schema.get("type", "object")}
        function |= {"parameters": parameters, "defer_loading": tool.defer_loading}
        made.append({"type": "function", "function": function})
    return made


def _tool_choice(request: MessagesRequest) -> str | dict[str, Any] | None:
    choice = request.tool_choice
    if choice is None or (choice.type == "auto" and not request.tools):
        return None
    if choice.type == "tool":
        return {"type": "function", "function": {"name": string_of(choice.name, "tool_choice.name")}}
    return _CHOICES[choice.type]


def _effort(request: CountTokensRequest) -> str | None:
    if request.thinking is not None and request.thinking.type == "disabled":
        return "none"
    return None if request.output_config is None else request.output_config.effort


def _response_format(request: MessagesRequest) -> dict[str, Any] | None:
    form = request.output_format if request.output_config is None else request.output_config.format
    if form is None or form.json_schema is None:
        return None
    schema = object_of(form.json_schema, "output_config.format.schema")
    return {"type": "json_schema", "json_schema": {"name": "json_schema", "schema": schema}}
