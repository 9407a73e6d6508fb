"""OpenAI's Responses API. Its requests are translated while they are parsed, and served as chats."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from semel.errors import SemelError
from semel.frontend.api.openai.translation import Translated
from semel.frontend.api.responses.events import RESPONSES_EVENTS, ResponsesStream
from semel.frontend.api.responses.request import TRANSLATED_RESPONSES, ResponsesEcho
from semel.frontend.api.responses.response import InputTokens, Response, ResponsesHead
from semel.frontend.http.sse import named_event
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


async def _respond(call: Call, request: Translated[ResponsesEcho]) -> HttpResponse:
    begun = await begin_translated(call, request)
    head = ResponsesHead(begun.name, begun.head.model, begun.head.created, request.echo, begun.media_ids)
    stream = ResponsesStream(head)

    def error_event(error: SemelError) -> bytes:
        return b"".join(map(named_event, stream.failure(public_error(error))))

    return await begun.respond_as(stream, head.whole, error_event)


async def _count(call: Call, request: Translated[ResponsesEcho]) -> HttpResponse:
    return json_response(InputTokens(await count_tokens(call, request)))
