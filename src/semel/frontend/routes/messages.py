"""Anthropic's Messages API. Its requests are translated while they are parsed, and served as chats."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from semel.core import Output
from semel.errors import SemelError
from semel.frontend.api.chat_response import ChatResponse
from semel.frontend.api.messages_request import TRANSLATED_COUNT, TRANSLATED_MESSAGES
from semel.frontend.api.messages_response import (
    MESSAGES_EVENTS,
    MessagesAnswer,
    MessagesErrorEvent,
    MessagesStream,
    TokenCount,
    whole_answer,
)
from semel.frontend.api.translation import Translated
from semel.frontend.http.errors import MESSAGES, messages_error_body
from semel.frontend.http.respond import respond
from semel.frontend.http.sse import EventFormat, named_event
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


class _Answer:
    """Makes an answer of this API from a chat's."""

    def __init__(self, chat: ChatResponse, name: str, model: str) -> None:
        self._chat = chat
        self._name = name
        self._stream = MessagesStream(name, model)

    def add(self, output: Output) -> None:
        self._chat.add(output)

    def whole(self) -> MessagesAnswer:
        return whole_answer(self._chat.whole(), self._name)

    def chunks(self, output: Output) -> Iterator[Struct]:
        for chunk in self._chat.chunks(output):
            yield from self._stream.events(chunk)

    def closing(self) -> Iterator[Struct]:
        for chunk in self._chat.closing():
            yield from self._stream.events(chunk)
        yield from self._stream.closing()


async def _respond(call: Call, request: Translated[None]) -> Response:
    begun = await begin_translated(call, request)
    answer = _Answer(begun.answer, begun.name, begun.head.model)
    form = EventFormat(named_event, _error_event, done=b"")
    return await respond(begun.stream, answer, streamed=begun.is_streamed, form=form)


async def _count(call: Call, request: Translated[None]) -> Response:
    return json_response(TokenCount(await count_tokens(call, request)))


def _error_event(error: SemelError) -> bytes:
    return named_event(MessagesErrorEvent(public_error_body(error, messages_error_body)["error"]))
