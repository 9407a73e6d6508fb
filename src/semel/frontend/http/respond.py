"""Sends answers of every shape: complete or as server-sent events, with an id, and with the error that ended them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Protocol

from starlette.responses import Response

from semel.core import Output
from semel.engine import Stream
from semel.errors import RequestError, ServiceError
from semel.frontend.http.sse import EventFormat, EventStream
from semel.web.responses import json_response

__all__ = ["AnswerBuilder", "respond", "with_error_event"]


class AnswerBuilder(Protocol):
    """Builds a response from outputs: chunk by chunk, or complete at the end."""

    def add(self, output: Output) -> None:
        """Collect an output for the complete response."""
        ...

    def whole(self) -> object:
        """The complete response."""
        ...

    def chunks(self, output: Output) -> Iterable[object]:
        """The chunks for one output."""
        ...

    def closing(self) -> Iterable[object]:
        """The chunks that end a stream."""
        ...


async def respond(
    stream: Stream, answer: AnswerBuilder, *, streamed: bool, form: EventFormat | None = None
) -> Response:
    """The response with an answer. It closes the stream when it ends."""
    if streamed:
        form = form or EventFormat()
        return EventStream([stream], with_error_event(_events(stream, answer, form), form), form)
    try:
        async for output in stream:
            answer.add(output)
    finally:
        await stream.close()
    return json_response(answer.whole())


async def _events(stream: Stream, answer: AnswerBuilder, form: EventFormat) -> AsyncIterator[bytes]:
    async for output in stream:
        for chunk in answer.chunks(output):
            yield form.encode(chunk)
    for chunk in answer.closing():
        yield form.encode(chunk)


async def with_error_event(events: AsyncIterator[bytes], form: EventFormat | None = None) -> AsyncIterator[bytes]:
    """The events, then the error that ended them, if any, then the end marker."""
    form = form or EventFormat()
    try:
        async for one in events:
            yield one
    except (RequestError, ServiceError) as error:
        yield form.error(error)
    if form.done:
        yield form.done
