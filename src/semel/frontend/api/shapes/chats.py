"""The shapes of answers to chats. Types only."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from semel.frontend.api.shapes.usage import PromptLogprob, StreamedUsage, Usage

__all__ = [
    "CalledFunction",
    "CalledFunctionDelta",
    "ChatChoice",
    "ChatChunkChoice",
    "ChatCompletion",
    "ChatCompletionChunk",
    "ChatDelta",
    "ChatLogprobs",
    "ChatMessage",
    "TokenLogprob",
    "ToolCall",
    "ToolCallDelta",
    "TopLogprob",
]


class TopLogprob(TypedDict):
    """One of the likeliest tokens."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TypedDict):
    """A token of a chat's answer, and the likeliest in its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """One entry for each token."""

    content: list[TokenLogprob]


class CalledFunction(TypedDict):
    """A function, and its arguments in JSON."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A call that the model makes."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(TypedDict):
    """What the model says."""

    role: str
    content: str | None
    refusal: None
    annotations: None
    audio: None
    function_call: None
    reasoning: str | None
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    """One of the `n` answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None
    routed_experts: None


class ChatCompletion(TypedDict):
    """The answer to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    service_tier: None
    system_fingerprint: str
    usage: Usage
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None
    prompt_token_ids: list[int] | None
    prompt_text: None
    kv_transfer_params: None
    ec_transfer_params: None
    metrics: None


class CalledFunctionDelta(TypedDict):
    """More of a function's name or arguments."""

    name: NotRequired[str | None]
    arguments: NotRequired[str | None]


class ToolCallDelta(TypedDict):
    """More of a call."""

    index: int
    id: NotRequired[str | None]
    type: NotRequired[Literal["function"] | None]
    function: NotRequired[CalledFunctionDelta | None]


class ChatDelta(TypedDict):
    """What to add to the message."""

    role: NotRequired[str | None]
    content: NotRequired[str | None]
    reasoning: NotRequired[str | None]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChatChunkChoice(TypedDict):
    """More of one of the `n` answers."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int] | None]


class ChatCompletionChunk(TypedDict):
    """More of the answer to a chat."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: NotRequired[str]
    usage: NotRequired[StreamedUsage]
    prompt_token_ids: NotRequired[list[int] | None]
    prompt_text: NotRequired[None]
