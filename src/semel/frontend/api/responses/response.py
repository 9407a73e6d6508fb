"""Answers in the shape of OpenAI's Responses API, made from those of chats. Pure.

The structs are the answer's items and the answer itself; `responses_events` has the events of a stream.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from semel.frontend.api.openai.chat_response import ChatCompletion, ToolCall
from semel.frontend.api.responses.input import CUSTOM_INPUT
from semel.frontend.api.responses.request import ResponsesEcho
from semel.frontend.api.shared.logprobs import ChatLogprobs, TokenLogprob
from semel.frontend.api.shared.usage import StreamedUsage, Usage

__all__ = [
    "CustomCallItem",
    "FunctionCallItem",
    "IncompleteDetails",
    "InputTokens",
    "InputTokensDetails",
    "ItemStatus",
    "MessageItem",
    "OutputItem",
    "OutputText",
    "OutputTokensDetails",
    "ReasoningItem",
    "ReasoningText",
    "Response",
    "ResponseFault",
    "ResponseReasoning",
    "ResponseStatus",
    "ResponseUsage",
    "ResponsesHead",
    "custom_input",
    "response_usage",
    "token_logprobs",
]

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["completed", "failed", "in_progress", "incomplete"]


class OutputText(Struct, tag="output_text", tag_field="type"):
    """A text of the answer."""

    text: str
    annotations: list[object] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(Struct, tag="reasoning_text", tag_field="type"):
    """A text of the reasoning."""

    text: str


class MessageItem(Struct, tag="message", tag_field="type"):
    """What the model says."""

    id: str
    content: list[OutputText]
    status: ItemStatus = "completed"
    role: Literal["assistant"] = "assistant"


class ReasoningItem(Struct, tag="reasoning", tag_field="type"):
    """What the model thinks. It is answered as it is, so there is no summary, and nothing is encrypted."""

    id: str
    content: list[ReasoningText]
    status: ItemStatus = "completed"
    summary: list[object] = []
    encrypted_content: None = None


class FunctionCallItem(Struct, tag="function_call", tag_field="type"):
    """A call of a function, with its arguments in JSON."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus = "completed"


class CustomCallItem(Struct, tag="custom_tool_call", tag_field="type"):
    """A call of a custom tool, with its text."""

    id: str
    call_id: str
    name: str
    input: str
    status: ItemStatus = "completed"


OutputItem = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem


class InputTokensDetails(Struct):
    """Which tokens of the input."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct):
    """Which tokens of the answer."""

    reasoning_tokens: int = 0


class ResponseUsage(Struct):
    """What an answer cost."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFault(Struct):
    """What ended an answer."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class IncompleteDetails(Struct):
    """Why an answer is not complete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseReasoning(Struct):
    """How much the model was to think."""

    effort: str | None = None
    summary: None = None


class Response(Struct, kw_only=True):
    """The answer to a Responses request. It repeats what the request says, unless that is long."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    error: ResponseFault | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    metadata: dict[str, str] = {}
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    text: dict[str, Any] | None = None
    reasoning: ResponseReasoning
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int = 0
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    max_output_tokens: int | None = None
    max_tool_calls: None = None
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    store: bool = False
    """True if the answer is stored, or will be when it is complete."""

    previous_response_id: str | None = None
    conversation: None = None
    prompt: None = None
    service_tier: None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    media_ids: list[str] | UnsetType = UNSET
    """With `return_media_ids`, in a complete answer: the ids of all items, in order."""


class InputTokens(Struct):
    """The number of tokens of a request."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


@dataclass(slots=True)
class ResponsesHead:
    """The fields that every event and the whole of one answer begin with."""

    name: str
    """The last part of all its ids."""

    model: str
    created: int
    echo: ResponsesEcho = field(default_factory=ResponsesEcho)
    media_ids: list[str] | None = None
    """The items in a complete answer, if the request wants them."""

    store: bool = False
    """True if the answer is to be stored."""

    def item_id(self, kind: str, index: int) -> str:
        """The id of the item at this place in the output."""
        return f"{kind}_{self.name}_{index}"

    def response(
        self,
        status: ResponseStatus,
        output: list[OutputItem],
        usage: ResponseUsage | None = None,
        error: ResponseFault | None = None,
    ) -> Response:
        """The answer with this output."""
        echo = self.echo
        return Response(
            id=f"resp_{self.name}",
            created_at=self.created,
            status=status,
            model=self.model,
            output=output,
            usage=usage,
            error=error,
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            reasoning=ResponseReasoning(echo.effort),
            store=self.store,
            **echo.fields,
            media_ids=UNSET if self.media_ids is None or usage is None else self.media_ids,
        )

    def whole(self, chat: ChatCompletion) -> Response:
        """The whole answer, from that of the chat."""
        choice = chat["choices"][0]
        output = list(self._items(chat))
        is_cut = choice["finish_reason"] == "length"
        if is_cut and output:
            output[-1].status = "incomplete"
        return self.response("incomplete" if is_cut else "completed", output, response_usage(chat["usage"]))

    def _items(self, chat: ChatCompletion) -> Iterator[OutputItem]:
        choice, index = chat["choices"][0], 0
        message = choice["message"]
        if reasoning := message["reasoning"]:
            yield ReasoningItem(self.item_id("rs", index), [ReasoningText(reasoning)])
            index += 1
        if content := message["content"]:
            text = OutputText(content, logprobs=token_logprobs(choice["logprobs"]))
            yield MessageItem(self.item_id("msg", index), [text])
            index += 1
        for call in message.get("tool_calls", ()):
            yield self._call(call, index)
            index += 1

    def _call(self, call: ToolCall, index: int) -> OutputItem:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if name in self.echo.custom_tools:
            return CustomCallItem(self.item_id("ctc", index), call["id"], name, custom_input(arguments))
        return FunctionCallItem(self.item_id("fc", index), call["id"], name, arguments)


def custom_input(arguments: str) -> str:
    """The text for a custom tool, from the arguments of the function that stands for it."""
    try:
        text = json.loads(arguments)[CUSTOM_INPUT]
    except (ValueError, LookupError, TypeError, RecursionError):
        return arguments
    return text if isinstance(text, str) else arguments


def token_logprobs(logprobs: ChatLogprobs | None) -> list[TokenLogprob]:
    """The log probabilities of a text's tokens."""
    return [] if logprobs is None else list(logprobs["content"] or ())


def response_usage(usage: Usage | StreamedUsage) -> ResponseUsage:
    """The usage of a chat in this API's names. An unknown detail is 0."""
    prompt = usage.get("prompt_tokens_details") or {}
    completion = usage.get("completion_tokens_details")
    return ResponseUsage(
        usage["prompt_tokens"],
        InputTokensDetails(prompt.get("cached_tokens") or 0, prompt.get("created_cache_tokens") or 0),
        usage["completion_tokens"],
        OutputTokensDetails(0 if completion is None else completion["reasoning_tokens"]),
        usage["total_tokens"],
    )
