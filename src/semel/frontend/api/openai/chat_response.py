"""Chat responses in OpenAI's shape, with the same fields as vLLM's server. Pure functions from outputs to JSON values.

The content comes from the engine: the text, or the message that its parsers made of the text. Fields that vLLM has and
semel never fills are present and null.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, cast

from typing_extensions import TypedDict

from semel.core import Output, Prompt
from semel.frontend.api.shared.logprobs import (
    ChatLogprobs,
    Decode,
    PromptLogprob,
    PromptPositions,
    TokenLogprob,
    chat_logprobs,
    prompt_logprobs,
)
from semel.frontend.api.shared.response_options import ResponseOptions
from semel.frontend.api.shared.usage import StreamedUsage, Usage, UsageCounter

__all__ = [
    "CalledFunction",
    "CalledFunctionDelta",
    "ChatChoice",
    "ChatChunkChoice",
    "ChatCompletion",
    "ChatCompletionChunk",
    "ChatDelta",
    "ChatMessage",
    "ChatResponse",
    "Head",
    "ToolCall",
    "ToolCallDelta",
]


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
    token_ids: Sequence[int] | None
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
    prompt_token_ids: Sequence[int] | None
    prompt_text: None
    kv_transfer_params: None
    ec_transfer_params: None
    metrics: None
    media_ids: NotRequired[list[str]]
    """With `return_media_ids`: the ids of all items, in order."""


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
    token_ids: NotRequired[Sequence[int] | None]


class ChatCompletionChunk(TypedDict):
    """More of the answer to a chat."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: NotRequired[str]
    usage: NotRequired[StreamedUsage]
    prompt_token_ids: NotRequired[Sequence[int] | None]
    prompt_text: NotRequired[None]
    media_ids: NotRequired[list[str]]
    """With `return_media_ids`, in the last chunk with usage: the ids of all items, in order."""


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that every response and every chunk begins with."""

    answer_id: str
    model: str
    fingerprint: str
    """Identifies the preprocessing: it changes when the processor turns media into other features."""

    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(slots=True)
class _Choice:
    """The output of one sequence so far."""

    text: list[str] = field(default_factory=list)
    message: Mapping[str, Any] | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    completion_tokens: int = 0


class ChatResponse:
    """Builds one chat response: chunk by chunk for a stream, or complete at the end."""

    def __init__(
        self,
        head: Head,
        prompt: Prompt,
        decode: Decode,
        *,
        count: int,
        options: ResponseOptions,
        role: str = "assistant",
        media_ids: Sequence[str] | None = None,
    ) -> None:
        self._head = head
        self._media_ids = media_ids
        self._prompt_ids = prompt.token_ids
        self._usage = UsageCounter.of(prompt)
        self._decode = decode
        self._options = options
        self._role = role
        self._choices = [_Choice() for _ in range(count)]
        self._prompt_logprobs: PromptPositions | None = None
        self._begun = False

    def add(self, output: Output) -> None:
        """Collect an output for the complete response."""
        self._usage.add(output)
        self._prompt_logprobs = output.prompt_logprobs or self._prompt_logprobs
        choice = self._choices[output.index]
        choice.text.append(output.text)
        choice.message = choice.message if output.message is None else output.message
        if self._options.token_ids:
            choice.token_ids += output.token_ids
        if self._options.logprobs:
            choice.logprobs += chat_logprobs(output, self._options, self._decode)
        if output.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = output.finish_reason, output.stop_reason

    def whole(self) -> ChatCompletion:
        """The complete response."""
        body: ChatCompletion = {
            "id": self._head.answer_id,
            "object": "chat.completion",
            "created": self._head.created,
            "model": self._head.model,
            "choices": [self._whole_choice(index, choice) for index, choice in enumerate(self._choices)],
            "service_tier": None,
            "system_fingerprint": self._head.fingerprint,
            "usage": self._usage.whole(),
            "prompt_logprobs": None if self._prompt_logprobs is None else prompt_logprobs(self._prompt_logprobs),
            "prompt_token_ids": self._prompt_ids if self._options.token_ids else None,
            "prompt_text": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }
        if self._media_ids is not None:
            body["media_ids"] = list(self._media_ids)
        return body

    def chunks(self, output: Output) -> list[ChatCompletionChunk]:
        """The chunks for one output. Before the first output, each choice gets a chunk with the role."""
        if output.cached_tokens is output.created_cache_tokens is output.reasoning_tokens is None:  # nearly always
            self._usage.completion_tokens += len(output.token_ids)
        else:
            self._usage.add(output)
        chunks: list[ChatCompletionChunk] = []
        if not self._begun:
            self._begun = True
            chunks += self._beginning()
        choice = self._choices[output.index]
        choice.completion_tokens += len(output.token_ids)
        if (shaped := self._piece(output)) is None:
            return chunks
        chunk = self._chunk([shaped])
        if output.finish_reason is not None:
            shaped["stop_reason"] = output.stop_reason
            if not self._options.usage:
                chunk["system_fingerprint"] = self._head.fingerprint
        if self._options.running_usage:
            chunk["usage"] = self._running_usage(choice.completion_tokens)
        chunks.append(chunk)
        return chunks

    def closing(self) -> Iterator[ChatCompletionChunk]:
        """The last chunk of a stream, with its usage, if the client requested it."""
        if self._options.usage:
            chunk = self._chunk([])
            chunk["usage"] = self._usage.known()
            chunk["system_fingerprint"] = self._head.fingerprint
            if self._media_ids is not None:
                chunk["media_ids"] = list(self._media_ids)
            yield chunk

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatCompletionChunk:
        return {
            "id": self._head.answer_id,
            "object": "chat.completion.chunk",
            "created": self._head.created,
            "model": self._head.model,
            "choices": choices,
        }

    def _whole_choice(self, index: int, choice: _Choice) -> ChatChoice:
        hidden = choice.message is not None and not self._options.reasoning
        return {
            "index": index,
            "message": self._message(choice),
            "logprobs": {"content": choice.logprobs} if self._options.logprobs and not hidden else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids if self._options.token_ids and not hidden else None,
            "routed_experts": None,
        }

    def _message(self, choice: _Choice) -> ChatMessage:
        text = "".join(choice.text)
        read: Mapping[str, Any] = {"content": text} if choice.message is None else choice.message
        message: ChatMessage = {
            "role": self._role,
            "content": read.get("content"),
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": read.get("reasoning"),
        }
        if calls := read.get("tool_calls"):
            message["tool_calls"] = calls
        return message

    def _beginning(self) -> Iterator[ChatCompletionChunk]:
        for index in range(len(self._choices)):
            delta: ChatDelta = {"role": self._role, "content": ""}
            chunk = self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])
            chunk["prompt_token_ids"] = self._prompt_ids if self._options.token_ids else None
            chunk["prompt_text"] = None
            if self._options.running_usage:
                chunk["usage"] = self._running_usage(0)
            yield chunk

    def _piece(self, output: Output) -> ChatChunkChoice | None:
        """The choice of a chunk; None if it would be empty. Tokens are hidden if the client excluded reasoning."""
        hidden = output.message is not None and not self._options.reasoning
        logprobs: ChatLogprobs | None = None
        token_ids: Sequence[int] | None = None
        if self._options.logprobs and not hidden:
            logprobs = {"content": chat_logprobs(output, self._options, self._decode)}
        if self._options.token_ids and not hidden:
            token_ids = output.token_ids
        # The engine's parsers return deltas in this shape. They are sent unchanged, which avoids a copy per token.
        delta: ChatDelta = {"content": output.text} if output.message is None else cast("ChatDelta", output.message)
        if not delta and output.finish_reason is None and logprobs is None and token_ids is None:
            return None
        return {
            "index": output.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
            "token_ids": token_ids,
        }

    def _running_usage(self, completion_tokens: int) -> StreamedUsage:
        """The usage of one choice. Its reasoning tokens are counted when it ends."""
        usage = self._usage.running(completion_tokens)
        usage["completion_tokens_details"] = self._usage.completion_details()
        return usage
