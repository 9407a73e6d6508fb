"""OpenAI's Responses API. Its requests are translated while they are parsed, and served as chats."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from semel.errors import InvalidRequest, SemelError
from semel.frontend.api.openai.translation import Translated
from semel.frontend.api.responses.events import RESPONSES_EVENTS, ResponsesStream
from semel.frontend.api.responses.request import TRANSLATED_RESPONSES, ResponsesEcho
from semel.frontend.api.responses.response import InputTokens, Response, ResponsesHead
from semel.frontend.api.responses.stored import Conversation
from semel.frontend.http.sse import named_event
from semel.frontend.routes.call import Call, serve_call
from semel.frontend.routes.chat import begin_translated, count_tokens
from semel.frontend.routes.openapi import DocumentedRoute, takes
from semel.frontend.routes.response_store import ResponseWriter, StoredResponses
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
        """Answer the items of a conversation, whole or as a stream of events."""
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
    before, turn = await _continue(call, request), request.echo.turn
    writer = None
    if (stored := StoredResponses.of(call.state)) is not None and turn.is_stored:
        tenant, limit = request.tenant(call.tenant), call.state.body.max_text_bytes
        writer = ResponseWriter(stored, tenant, call.account, turn, before, limit)
    else:
        turn.input = None  # it has the media
    earlier = before.media
    del before  # nor must this frame keep what it continues
    try:
        returns_ids = request.name_media(always=writer is not None)
        begun = await begin_translated(call, request, None if writer is None else writer.take_items)
        ids = begun.media_ids[earlier:] if returns_ids and begun.media_ids is not None else None
        name = begun.name if writer is None else writer.name
        head = ResponsesHead(name, begun.head.model, begun.head.created, request.echo, ids, writer is not None)
        stream = ResponsesStream(head)

        def error_event(error: SemelError) -> bytes:
            return b"".join(map(named_event, stream.failure(public_error(error))))

        return await begun.respond_as(stream, head.whole, error_event, writer)
    except BaseException:
        if writer is not None:
            await writer.close()
        raise


async def _count(call: Call, request: Translated[ResponsesEcho]) -> HttpResponse:
    await _continue(call, request)
    request.echo.turn.input = None
    return json_response(InputTokens(await count_tokens(call, request)))


async def _continue(call: Call, request: Translated[ResponsesEcho]) -> Conversation:
    """Put the conversation that a request continues before its own items."""
    if (previous := request.echo.turn.previous_response_id) is None:
        return Conversation()
    if (stored := StoredResponses.of(call.state)) is None:
        raise InvalidRequest.of(
            "previous_response_id",
            "no responses are stored here; send the items of the previous answer in input, before the new, or start "
            "the server with --media-store and --store-responses",
        )
    before = await stored.continued(request.tenant(call.tenant), previous, call.account, call.state.body)
    request.put_before(before.messages, behind="instructions")
    return before
