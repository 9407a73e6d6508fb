"""How answers go out, whatever they tell: whole or as events, under a name, and with the error that ended them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, Final, Protocol

from fastapi import Request, Response

from semel.core import Output
from semel.engine import Stream
from semel.errors import RequestError, ServiceError
from semel.frontend.api.chat_response import error_body
from semel.frontend.http.body import as_json
from semel.frontend.http.sse import DONE, EventStream, event
from semel.telemetry.request_context import tell_fault

__all__ = ["AnswerBuilder", "client_request_id", "respond", "with_error_event"]

_MAX_ID_CHARS: Final = 128


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
    return as_json(answer.whole())


async def _events(stream: Stream, answer: AnswerBuilder) -> AsyncIterator[bytes]:
    async for output in stream:
        for chunk in answer.chunks(output):
            yield event(chunk)
    for chunk in answer.closing():
        yield event(chunk)


def client_request_id(request: Request) -> str | None:
    """What the answer's id is to end with, by its header; inside, requests have ids of our own."""
    wished = request.headers.get("x-request-id")
    return wished if wished and len(wished) <= _MAX_ID_CHARS and wished.isprintable() else None


async def with_error_event(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The events, then the error that ended them if one did, then the end."""
    try:
        async for one in events:
            yield one
    except (RequestError, ServiceError) as error:
        tell_fault(error)
        param = error.param if isinstance(error, RequestError) else None
        yield event(error_body(str(error), code=error.code, status=error.status, param=param))
    yield DONE
