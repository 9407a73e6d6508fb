"""Answers in the shape of Anthropic's Messages API, made from those of chats: whole, and as events. Pure.

At most one block of a stream is open. A block begins when a chunk has more of it, and ends when another begins or the
stream ends. What comes for a call after its end is sent nevertheless, with the index of its block.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, cast

import pydantic_core
from msgspec import UNSET, Raw, Struct, UnsetType

from semel.frontend.api.openai.chat_response import ChatCompletion, ChatCompletionChunk, ToolCallDelta
from semel.frontend.api.shared.usage import StreamedUsage, Usage

__all__ = [
    "MESSAGES_EVENTS",
    "BlockDelta",
    "BlockStart",
    "BlockStop",
    "InputJsonDelta",
    "MessageDelta",
    "MessageStart",
    "MessageStop",
    "MessagesAnswer",
    "MessagesErrorEvent",
    "MessagesStream",
    "MessagesUsage",
    "SignatureDelta",
    "StopDelta",
    "TextBlock",
    "TextDelta",
    "ThinkingBlock",
    "ThinkingDelta",
    "TokenCount",
    "ToolUseBlock",
    "is_json",
    "whole_answer",
]

SIGNATURE: Final = "semel"
"""Stands for the signature of a block of thinking. Some clients send back only blocks that have one."""

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(Struct, tag="text", tag_field="type"):
    """A text of the answer."""

    text: str
    citations: None = None


class ThinkingBlock(Struct, tag="thinking", tag_field="type"):
    """What the model thinks."""

    thinking: str
    signature: str = SIGNATURE


class ToolUseBlock(Struct, tag="tool_use", tag_field="type"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessagesUsage(Struct):
    """What an answer cost. The tokens of the input are those that were not cached."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class MessagesAnswer(Struct, tag="message", tag_field="type", kw_only=True):
    """The answer to a Messages request."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage
    media_ids: list[str] | UnsetType = UNSET
    """With `return_media_ids`: the ids of all images, in the order of the request."""


class TokenCount(Struct):
    """The number of tokens of a request."""

    input_tokens: int


class _Event(Struct, tag_field="type"):
    pass


class MessageStart(_Event, tag="message_start"):
    """The answer begins."""

    message: MessagesAnswer


class BlockStart(_Event, tag="content_block_start"):
    """A block begins."""

    index: int
    content_block: Block


class TextDelta(Struct, tag="text_delta", tag_field="type"):
    """More text."""

    text: str


class ThinkingDelta(Struct, tag="thinking_delta", tag_field="type"):
    """More thinking."""

    thinking: str


class SignatureDelta(Struct, tag="signature_delta", tag_field="type"):
    """The signature of a block of thinking."""

    signature: str


class InputJsonDelta(Struct, tag="input_json_delta", tag_field="type"):
    """More of a call's input, in JSON."""

    partial_json: str


BlockDeltaKind = TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockDelta(_Event, tag="content_block_delta"):
    """More of a block."""

    index: int
    delta: BlockDeltaKind


class BlockStop(_Event, tag="content_block_stop"):
    """A block ends."""

    index: int


class StopDelta(Struct):
    """Why the answer ends."""

    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageDelta(_Event, tag="message_delta"):
    """The answer ends."""

    delta: StopDelta
    usage: MessagesUsage


class MessageStop(_Event, tag="message_stop"):
    """The stream ends."""


class MessagesErrorEvent(_Event, tag="error"):
    """An error ended the answer."""

    error: Mapping[str, Any]


MESSAGES_EVENTS = (*(MessageStart, BlockStart, BlockDelta, BlockStop, MessageDelta, MessageStop, MessagesErrorEvent),)


def whole_answer(chat: ChatCompletion, name: str, media_ids: list[str] | UnsetType = UNSET) -> MessagesAnswer:
    """The whole answer, from that of the chat."""
    choice = chat["choices"][0]
    message = choice["message"]
    blocks: list[Block] = []
    if reasoning := message["reasoning"]:
        blocks.append(ThinkingBlock(reasoning))
    if content := message["content"]:
        blocks.append(TextBlock(content))
    calls = message.get("tool_calls", [])
    functions = [(call["id"], call["function"]) for call in calls]
    blocks += [ToolUseBlock(call_id, called["name"], _input(called["arguments"])) for call_id, called in functions]
    is_complete = bool(calls) and is_json(calls[-1]["function"]["arguments"])
    reason, sequence = _stop(choice["finish_reason"], choice["stop_reason"], bool(calls), is_complete)
    return MessagesAnswer(
        id=f"msg_{name}",
        model=chat["model"],
        content=blocks or [TextBlock("")],  # clients look at the first block
        stop_reason=reason,
        stop_sequence=sequence,
        usage=_usage(chat["usage"]),
        media_ids=media_ids,
    )


class MessagesStream:
    """Turns the chunks of one chat into events."""

    def __init__(self, name: str, model: str, media_ids: list[str] | UnsetType = UNSET) -> None:
        self._name, self._model, self._media_ids = name, model, media_ids
        self._has_begun = False
        self._blocks = 0
        self._open: Literal["text", "thinking", "tool_use"] | None = None
        self._calls: dict[int, int] = {}
        self._last_call: list[str] = []
        self._finish: str | None = None
        self._stop: int | str | None = None
        self._usage = MessagesUsage(0, 0)

    def events(self, chunk: ChatCompletionChunk) -> Iterator[Struct]:
        """The events for a chunk."""
        if (usage := chunk.get("usage")) is not None:
            self._usage = _usage(usage)
        yield from self._beginning()
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if reasoning := delta.get("reasoning"):
                yield from self._begin("thinking", ThinkingBlock("", ""))
                yield self._delta(ThinkingDelta(reasoning))
            if content := delta.get("content"):
                yield from self._begin("text", TextBlock(""))
                yield self._delta(TextDelta(content))
            for call in delta.get("tool_calls", ()):
                yield from self._add_call(call)
            if choice["finish_reason"] is not None:
                self._finish, self._stop = choice["finish_reason"], choice.get("stop_reason")

    def closing(self) -> Iterator[Struct]:
        """The events that end the answer."""
        yield from self._beginning()
        if not self._blocks:
            yield from self._begin("text", TextBlock(""))  # clients look at the first block
        yield from self._close()
        is_complete = bool(self._calls) and is_json("".join(self._last_call))
        reason, sequence = _stop(self._finish, self._stop, bool(self._calls), is_complete)
        yield MessageDelta(StopDelta(reason, sequence), self._usage)
        yield MessageStop()

    def _beginning(self) -> Iterator[Struct]:
        if not self._has_begun:
            self._has_begun = True
            message = MessagesAnswer(
                id=f"msg_{self._name}",
                model=self._model,
                content=[],
                stop_reason=None,
                stop_sequence=None,
                usage=self._usage,
                media_ids=self._media_ids,
            )
            yield MessageStart(message)

    def _add_call(self, delta: ToolCallDelta) -> Iterator[Struct]:
        function = delta.get("function") or {}
        if delta["index"] not in self._calls:
            block = ToolUseBlock(
                delta.get("id") or f"toolu_{self._name}_{self._blocks}", function.get("name") or "", {}
            )
            yield from self._begin("tool_use", block, is_new=True)
            self._calls[delta["index"]] = self._blocks - 1
            self._last_call = []
        if arguments := function.get("arguments"):
            self._last_call.append(arguments)
            yield BlockDelta(self._calls[delta["index"]], InputJsonDelta(arguments))

    def _begin(
        self, kind: Literal["text", "thinking", "tool_use"], block: Block, *, is_new: bool = False
    ) -> Iterator[Struct]:
        """Begin a block, unless one of this kind is open."""
        if self._open == kind and not is_new:
            return
        yield from self._close()
        yield BlockStart(self._blocks, block)
        self._open = kind
        self._blocks += 1

    def _delta(self, delta: BlockDeltaKind) -> BlockDelta:
        return BlockDelta(self._blocks - 1, delta)

    def _close(self) -> Iterator[Struct]:
        """End the open block, if there is one."""
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta(SignatureDelta(SIGNATURE))
        self._open = None
        yield BlockStop(self._blocks - 1)


def is_json(text: str) -> bool:
    """Return whether a call's arguments are complete."""
    try:
        pydantic_core.from_json(text, allow_inf_nan=False)
    except ValueError:
        return False
    return True


def _input(arguments: str) -> dict[str, Any]:
    """The input of a call: its arguments as the model wrote them, which are JSON already.

    Of arguments that were cut, what is complete, as clients make of a stream. Arguments that are no object are none.
    """
    try:
        value = pydantic_core.from_json(arguments, allow_partial=True, allow_inf_nan=False)
    except ValueError:
        return {}
    if not isinstance(value, dict):
        return {}
    text = arguments if is_json(arguments) else json.dumps(value)
    return cast("dict[str, Any]", Raw(text.encode()))


def _stop(
    finish: str | None, stop: int | str | None, has_calls: bool, is_complete: bool
) -> tuple[StopReason, str | None]:
    """Why an answer ended. A stop sequence counts unless the calls are complete: one that it cut must not run."""
    if finish == "length":
        return "max_tokens", None
    if isinstance(stop, str) and not is_complete:
        return "stop_sequence", stop
    return "tool_use" if has_calls else "end_turn", None


def _usage(usage: Usage | StreamedUsage) -> MessagesUsage:
    """The usage of a chat in this API's names: here the input's tokens do not include those of the cache."""
    prompt = usage.get("prompt_tokens_details") or {}
    read, created = prompt.get("cached_tokens"), prompt.get("created_cache_tokens")
    fresh = max(0, usage["prompt_tokens"] - (read or 0) - (created or 0))
    return MessagesUsage(fresh, usage["completion_tokens"], read, created)
