"""OpenAI's Responses API. Its requests are translated while they are parsed, and served as chats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from semel.core import Output
from semel.errors import SemelError
from semel.frontend.api.chat_response import ChatResponse
from semel.frontend.api.responses_events import RESPONSES_EVENTS, ResponsesStream
from semel.frontend.api.responses_request import TRANSLATED_RESPONSES, ResponsesEcho
from semel.frontend.api.responses_response import InputTokens, Response, ResponsesHead
from semel.frontend.api.translation import Translated
from semel.frontend.http.respond import respond
from semel.frontend.http.sse import EventFormat, named_event
from semel.frontend.routes.call import Call, serve_call
from semel.frontend.routes.chat import begin_translated, count_tokens
from semel.frontend.routes.openapi import DocumentedRoute, takes
from semel.frontend.service import FrontendState
from semel.web.errors import public_error
from semel.web.openapi import EVENTS, JSON, named_events_of, shape
from semel.web.responses import json_response

__all__ = ["responses_routes"]

_OPERATION: Final = takes(
    TRANSLATED_RESPONSES, {JSON: shape(Response), EVENTS: named_events_of(*RESPONSES_EVENTS)}, named=True
)


def responses_routes(service: FrontendState) -> list[DocumentedRoute]:
    """The routes of the Responses API."""

    async def responses(request: Request) -> HttpResponse:
        """Answer the items of a conversation, whole or as a stream of events. Nothing is stored."""
        return await serve_call(request, service, TRANSLATED_RESPONSES, _respond)

    async def responses_input_tokens(request: Request) -> HttpResponse:
        """Count the tokens of a request."""
        return await serve_call(request, service, TRANSLATED_RESPONSES, _count)

    count = takes(TRANSLATED_RESPONSES, {JSON: shape(InputTokens)})
    return [
        DocumentedRoute("/v1/responses", responses, methods=["POST"], operation=_OPERATION),
        DocumentedRoute("/v1/responses/input_tokens", responses_input_tokens, methods=["POST"], operation=count),
    ]


class _Answer:
    """Makes an answer of this API from a chat's."""

    def __init__(self, chat: ChatResponse, head: ResponsesHead) -> None:
        self._chat = chat
        self._head = head
        self._stream = ResponsesStream(head)

    def add(self, output: Output) -> None:
        self._chat.add(output)

    def whole(self) -> Response:
        return self._head.whole(self._chat.whole())

    def chunks(self, output: Output) -> Iterator[Struct]:
        for chunk in self._chat.chunks(output):
            yield from self._stream.events(chunk)

    def closing(self) -> Iterator[Struct]:
        for chunk in self._chat.closing():
            yield from self._stream.events(chunk)
        yield from self._stream.closing()

    def error(self, error: SemelError) -> bytes:
        return b"".join(map(named_event, self._stream.failure(public_error(error))))


async def _respond(call: Call, request: Translated[ResponsesEcho]) -> HttpResponse:
    begun = await begin_translated(call, request)
    head = ResponsesHead(begun.name, begun.head.model, begun.head.created, request.echo, begun.media_ids)
    answer = _Answer(begun.answer, head)
    return await respond(
        begun.stream, answer, streamed=begun.is_streamed, form=EventFormat(named_event, answer.error, done=b"")
    )


async def _count(call: Call, request: Translated[ResponsesEcho]) -> HttpResponse:
    return json_response(InputTokens(await count_tokens(call, request)))
