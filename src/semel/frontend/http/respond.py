"""How answers go out, whatever they tell: whole or as events, under a name, and with the error that ended them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Protocol

from starlette.responses import Response

from semel.core import Output
from semel.engine import Stream
from semel.errors import RequestError, ServiceError
from semel.frontend.http.sse import DONE, EventStream, error_event, event
from semel.web.responses import json_response

__all__ = ["AnswerBuilder", "respond", "with_error_event"]


class AnswerBuilder(Protocol):
    """An answer that is shaped as its outputs come, or from all of them at the end."""

    def add(self, output: Output) -> None:
        """Keep an output for the whole answer."""
        ...

    def whole(self) -> Mapping[str, Any]:
        """The answer in one piece."""
        ...

    def chunks(self, output: Output) -> Iterable[Mapping[str, Any]]:
        """An output as chunks of a stream."""
        ...

    def closing(self) -> Iterable[Mapping[str, Any]]:
        """What a stream ends with."""
        ...


async def respond(stream: Stream, answer: AnswerBuilder, *, streamed: bool) -> Response:
    """The response that tells an answer; the stream is closed with it."""
    if streamed:
        return EventStream([stream], with_error_event(_events(stream, answer)))
    try:
        async for output in stream:
            answer.add(output)
    finally:
        await stream.close()
    return json_response(answer.whole())


async def _events(stream: Stream, answer: AnswerBuilder) -> AsyncIterator[bytes]:
    async for output in stream:
        for chunk in answer.chunks(output):
            yield event(chunk)
    for chunk in answer.closing():
        yield event(chunk)


async def with_error_event(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The events, then the error that ended them if one did, then the end."""
    try:
        async for one in events:
            yield one
    except (RequestError, ServiceError) as error:
        yield error_event(error)
    yield DONE
