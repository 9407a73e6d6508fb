"""Anthropic's Messages API. Its requests are translated while they are parsed, and served as chats."""

from __future__ import annotations

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from semel.errors import SemelError
from semel.frontend.api.anthropic.request import TRANSLATED_COUNT, TRANSLATED_MESSAGES, ImageNumbers
from semel.frontend.api.anthropic.response import (
    MESSAGES_EVENTS,
    MessagesAnswer,
    MessagesErrorEvent,
    MessagesStream,
    TokenCount,
    whole_answer,
)
from semel.frontend.api.openai.translation import Translated
from semel.frontend.http.errors import MESSAGES, messages_error_body
from semel.frontend.http.sse import named_event
from semel.frontend.routes.call import Call, serve_call
from semel.frontend.routes.chat import begin_translated, count_tokens
from semel.frontend.routes.openapi import DocumentedRoute, takes
from semel.frontend.service import FrontendState
from semel.web.errors import public_error_body
from semel.web.openapi import EVENTS, JSON, named_events_of, shape
from semel.web.responses import json_response

__all__ = ["messages_routes"]


def messages_routes(service: FrontendState) -> list[DocumentedRoute]:
    """The routes of the Messages API."""

    async def messages(request: Request) -> Response:
        """Answer a conversation, whole or as a stream of events."""
        return await serve_call(request, service, TRANSLATED_MESSAGES, _respond)

    async def messages_count_tokens(request: Request) -> Response:
        """Count the tokens of a conversation."""
        return await serve_call(request, service, TRANSLATED_COUNT, _count)

    answers = {JSON: shape(MessagesAnswer), EVENTS: named_events_of(*MESSAGES_EVENTS)}
    operation = takes(TRANSLATED_MESSAGES, answers, named=True, errors="Messages")
    count = takes(TRANSLATED_COUNT, {JSON: shape(TokenCount)}, errors="Messages")
    return [
        DocumentedRoute(MESSAGES, messages, methods=["POST"], operation=operation),
        DocumentedRoute(f"{MESSAGES}/count_tokens", messages_count_tokens, methods=["POST"], operation=count),
    ]


async def _respond(call: Call, request: Translated[ImageNumbers]) -> Response:
    begun = await begin_translated(call, request)
    ids = begun.media_ids
    ordered = UNSET if ids is None else [one for _, one in sorted(zip(request.echo, ids, strict=True))]
    stream = MessagesStream(begun.name, begun.head.model, ordered)
    return await begun.respond_as(stream, lambda chat: whole_answer(chat, begun.name, ordered), _error_event)


async def _count(call: Call, request: Translated[ImageNumbers]) -> Response:
    return json_response(TokenCount(await count_tokens(call, request)))


def _error_event(error: SemelError) -> bytes:
    return named_event(MessagesErrorEvent(public_error_body(error, messages_error_body)["error"]))
