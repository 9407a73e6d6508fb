"""The events of a Responses stream, from the chunks of a chat: a small state machine without I/O.

At most one item is open. An item begins when a chunk has more of it, and ends when another begins or the stream ends.
What comes for a call after its end is sent nevertheless, and is in the answer that the last event has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct

from semel.errors import RequestError, ServiceError
from semel.frontend.api.openai.chat_response import ChatCompletionChunk, ToolCallDelta
from semel.frontend.api.responses.response import (
    CustomCallItem,
    FunctionCallItem,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseFault,
    ResponsesHead,
    ResponseUsage,
    custom_input,
    response_usage,
    token_logprobs,
)
from semel.frontend.api.shared.logprobs import TokenLogprob

__all__ = [
    "RESPONSES_EVENTS",
    "ContentPartAdded",
    "ContentPartDone",
    "CustomInputDelta",
    "CustomInputDone",
    "FunctionCallArgumentsDelta",
    "FunctionCallArgumentsDone",
    "OutputItemAdded",
    "OutputItemDone",
    "OutputTextDelta",
    "OutputTextDone",
    "ReasoningTextDelta",
    "ReasoningTextDone",
    "ResponseCompleted",
    "ResponseCreated",
    "ResponseErrorEvent",
    "ResponseFailed",
    "ResponseInProgress",
    "ResponseIncomplete",
    "ResponsesStream",
]


class _Event(Struct, tag_field="type"):
    sequence_number: int


class _ResponseEvent(_Event):
    response: Response


class _OutputItemEvent(_Event):
    output_index: int
    item: OutputItem


class _ItemEvent(_Event):
    item_id: str
    output_index: int


class _PartEvent(_ItemEvent, kw_only=True):
    content_index: Literal[0] = 0


class _ContentPartEvent(_PartEvent):
    part: OutputText | ReasoningText


class ResponseCreated(_ResponseEvent, tag="response.created"):
    """The answer begins."""


class ResponseInProgress(_ResponseEvent, tag="response.in_progress"):
    """The answer is being generated."""


class ResponseCompleted(_ResponseEvent, tag="response.completed"):
    """The answer is complete."""


class ResponseIncomplete(_ResponseEvent, tag="response.incomplete"):
    """The answer was cut at `max_output_tokens`."""


class ResponseFailed(_ResponseEvent, tag="response.failed"):
    """An error ended the answer."""


class ResponseErrorEvent(_Event, tag="error"):
    """An error ended the answer."""

    code: str
    message: str
    param: str | None


class OutputItemAdded(_OutputItemEvent, tag="response.output_item.added"):
    """An item begins."""


class OutputItemDone(_OutputItemEvent, tag="response.output_item.done"):
    """An item ends."""


class ContentPartAdded(_ContentPartEvent, tag="response.content_part.added"):
    """A part of an item begins."""


class ContentPartDone(_ContentPartEvent, tag="response.content_part.done"):
    """A part of an item ends."""


class OutputTextDelta(_PartEvent, tag="response.output_text.delta"):
    """More text."""

    delta: str
    logprobs: list[TokenLogprob]


class OutputTextDone(_PartEvent, tag="response.output_text.done"):
    """The text."""

    text: str
    logprobs: list[TokenLogprob]


class ReasoningTextDelta(_PartEvent, tag="response.reasoning_text.delta"):
    """More reasoning."""

    delta: str


class ReasoningTextDone(_PartEvent, tag="response.reasoning_text.done"):
    """The reasoning."""

    text: str


class FunctionCallArgumentsDelta(_ItemEvent, tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    delta: str


class FunctionCallArgumentsDone(_ItemEvent, tag="response.function_call_arguments.done"):
    """A call's arguments."""

    name: str
    arguments: str


class CustomInputDelta(_ItemEvent, tag="response.custom_tool_call_input.delta"):
    """More text for a custom tool."""

    delta: str


class CustomInputDone(_ItemEvent, tag="response.custom_tool_call_input.done"):
    """The text for a custom tool."""

    input: str


RESPONSES_EVENTS = (
    *(ResponseCreated, ResponseInProgress, ResponseCompleted, ResponseIncomplete, ResponseFailed, ResponseErrorEvent),
    *(OutputItemAdded, OutputItemDone, ContentPartAdded, ContentPartDone, OutputTextDelta, OutputTextDone),
    *(ReasoningTextDelta, ReasoningTextDone, FunctionCallArgumentsDelta, FunctionCallArgumentsDone),
    *(CustomInputDelta, CustomInputDone),
)

_ItemKind = Literal["rs", "msg", "fc", "ctc"]


@dataclass(slots=True)
class _Item:
    """An item so far."""

    kind: _ItemKind
    item_id: str
    output_index: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def place(self) -> tuple[str, int]:
        return self.item_id, self.output_index

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def part(self) -> OutputText | ReasoningText:
        return ReasoningText(self.text) if self.kind == "rs" else OutputText(self.text, logprobs=[*self.logprobs])

    def item(self, status: ItemStatus) -> OutputItem:
        has_part = status != "in_progress"
        match self.kind:
            case "rs":
                return ReasoningItem(self.item_id, [ReasoningText(self.text)] if has_part else [], status)
            case "msg":
                text = OutputText(self.text, logprobs=[*self.logprobs])
                return MessageItem(self.item_id, [text] if has_part else [], status)
            case "fc":
                return FunctionCallItem(self.item_id, self.call_id, self.name, self.text if has_part else "", status)
            case "ctc":
                text_input = custom_input(self.text) if has_part else ""
                return CustomCallItem(self.item_id, self.call_id, self.name, text_input, status)


class ResponsesStream:
    """Turns the chunks of one chat into events."""

    def __init__(self, head: ResponsesHead) -> None:
        self._head = head
        self._count = 0
        self._items: list[_Item] = []
        self._open: _Item | None = None
        self._calls: dict[int, _Item] = {}
        self._usage: ResponseUsage | None = None
        self._is_cut = False

    def events(self, chunk: ChatCompletionChunk) -> Iterator[Struct]:
        """The events for a chunk."""
        yield from self._beginning()
        if (usage := chunk.get("usage")) is not None:
            self._usage = response_usage(usage)
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if reasoning := delta.get("reasoning"):
                yield from self._add("rs", reasoning)
            if content := delta.get("content"):
                yield from self._add("msg", content, token_logprobs(choice["logprobs"]))
            for call in delta.get("tool_calls", ()):
                yield from self._add_call(call)
            self._is_cut = self._is_cut or choice["finish_reason"] == "length"

    def closing(self) -> Iterator[Struct]:
        """The events that end the answer."""
        yield from self._beginning()
        yield from self._close("incomplete" if self._is_cut else "completed")
        output = [item.item("completed") for item in self._items]
        if self._is_cut and output:
            output[-1].status = "incomplete"
        status: Literal["incomplete", "completed"] = "incomplete" if self._is_cut else "completed"
        kind = ResponseIncomplete if self._is_cut else ResponseCompleted
        yield kind(self._next(), self._head.response(status, output, self._usage))

    def failure(self, error: RequestError | ServiceError) -> Iterator[Struct]:
        """The events for an error that ends the answer."""
        yield from self._beginning()  # OpenAI's client takes no other event first
        param = error.param if isinstance(error, RequestError) else None
        yield ResponseErrorEvent(self._next(), error.code, str(error), param)
        code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"] = "server_error"
        if error.status < 500:
            code = "rate_limit_exceeded" if error.status == 429 else "invalid_prompt"
        output = [item.item("incomplete" if item is self._open else "completed") for item in self._items]
        response = self._head.response("failed", output, self._usage, ResponseFault(code, str(error)))
        yield ResponseFailed(self._next(), response)

    def _beginning(self) -> Iterator[Struct]:
        if not self._count:
            for kind in (ResponseCreated, ResponseInProgress):
                yield kind(self._next(), self._head.response("in_progress", []))

    def _add(
        self, kind: Literal["rs", "msg"], text: str, logprobs: list[TokenLogprob] | None = None
    ) -> Iterator[Struct]:
        item = self._open
        if item is None or item.kind != kind:
            yield from self._begin(item := self._item(kind))
            yield ContentPartAdded(self._next(), *item.place, item.part())
        item.pieces.append(text)
        if kind == "rs":
            yield ReasoningTextDelta(self._next(), *item.place, text)
        else:
            item.logprobs += logprobs or ()
            yield OutputTextDelta(self._next(), *item.place, text, logprobs or [])

    def _add_call(self, delta: ToolCallDelta) -> Iterator[Struct]:
        function = delta.get("function") or {}
        if (item := self._calls.get(delta["index"])) is None:
            name = function.get("name") or ""
            item = self._item("ctc" if name in self._head.echo.custom_tools else "fc")
            item.call_id, item.name = delta.get("id") or item.item_id, name
            self._calls[delta["index"]] = item
            yield from self._begin(item)
        if arguments := function.get("arguments"):
            item.pieces.append(arguments)
            if item.kind == "fc":
                yield FunctionCallArgumentsDelta(self._next(), *item.place, arguments)

    def _item(self, kind: _ItemKind) -> _Item:
        index = len(self._items)
        item = _Item(kind, self._head.item_id(kind, index), index)
        self._items.append(item)
        return item

    def _begin(self, item: _Item) -> Iterator[Struct]:
        yield from self._close("completed")
        self._open = item
        yield OutputItemAdded(self._next(), item.output_index, item.item("in_progress"))

    def _close(self, status: ItemStatus) -> Iterator[Struct]:
        """End the open item, if there is one."""
        if (item := self._open) is None:
            return
        self._open = None
        match item.kind:
            case "rs":
                yield ReasoningTextDone(self._next(), *item.place, item.text)
            case "msg":
                yield OutputTextDone(self._next(), *item.place, item.text, item.logprobs)
            case "fc":
                yield FunctionCallArgumentsDone(self._next(), *item.place, item.name, item.text)
            case "ctc":
                text = custom_input(item.text)
                yield CustomInputDelta(self._next(), *item.place, text)
                yield CustomInputDone(self._next(), *item.place, text)
        if item.kind in ("rs", "msg"):
            yield ContentPartDone(self._next(), *item.place, item.part())
        yield OutputItemDone(self._next(), item.output_index, item.item(status))

    def _next(self) -> int:
        self._count += 1
        return self._count - 1
