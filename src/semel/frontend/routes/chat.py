"""One chat, from the request to the answer: what the routes of all APIs that chat share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from msgspec import UNSET, Struct
from starlette.responses import Response

from semel.core import Output
from semel.engine import Stream
from semel.errors import SemelError
from semel.fleet.affinity import ConversationPrefix
from semel.fleet.stream import BufferedAnswer, StreamedAnswer
from semel.frontend.api.openai.chat_response import ChatCompletion, ChatCompletionChunk, ChatResponse, Head
from semel.frontend.api.openai.requests import ChatCompletionRequest
from semel.frontend.api.openai.translation import Translated
from semel.frontend.execution import submit_request
from semel.frontend.http.sse import AnswerWriter, EventFormat, named_event, respond
from semel.frontend.routes.call import Call
from semel.frontend.service import ServedModel
from semel.render import ParsedRequest
from semel.store.names import public_id

__all__ = ["BegunChat", "EventTranslator", "answer_head", "begin_chat", "begin_translated", "count_tokens"]

OnRead = Callable[[ParsedRequest], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class BegunChat:
    """A chat that a worker answers."""

    stream: Stream
    """Its outputs."""

    answer: ChatResponse
    """The builder of the answer."""

    head: Head
    name: str
    """The end of the ids of the answer."""

    is_streamed: bool
    media_ids: list[str] | None
    """The ids of its items, if the request wants them."""

    async def respond_as(
        self,
        stream: EventTranslator,
        translate: Callable[[ChatCompletion], object],
        error_event: Callable[[SemelError], bytes],
        writer: AnswerWriter | None = None,
    ) -> Response:
        """The response of another API: `translate` makes its answer of the chat's, `stream` its events."""
        form = EventFormat(named_event, error_event, done=b"")
        answer = _TranslatedAnswer(self.answer, stream, translate)
        return await respond(self.stream, answer, streamed=self.is_streamed, form=form, writer=writer)


class EventTranslator(Protocol):
    """Turns the chunks of one chat into events of another API."""

    def events(self, chunk: ChatCompletionChunk) -> Iterator[Struct]:
        """The events for a chunk."""
        ...

    def closing(self) -> Iterator[Struct]:
        """The events that end a stream."""
        ...


@dataclass(frozen=True, slots=True)
class _TranslatedAnswer:
    chat: ChatResponse
    stream: EventTranslator
    translate: Callable[[ChatCompletion], object]

    def add(self, output: Output) -> None:
        self.chat.add(output)

    def whole(self) -> object:
        return self.translate(self.chat.whole())

    def chunks(self, output: Output) -> Iterator[Struct]:
        for chunk in self.chat.chunks(output):
            yield from self.stream.events(chunk)

    def closing(self) -> Iterator[Struct]:
        for chunk in self.chat.closing():
            yield from self.stream.events(chunk)
        yield from self.stream.closing()


async def begin_chat(call: Call, request: ChatCompletionRequest, on_read: OnRead | None = None) -> BegunChat:
    """Submit a chat. Its caller keeps no reference to the request: it has the media, which are dropped early.

    `on_read` is called with the parsed request, before it is submitted.
    """
    serving, role, is_streamed = call.serving, request.role, request.stream
    if (pooling := serving.contract.pooling) is not UNSET:
        serving.refuse_to_generate(pooling)
    name = call.answer_id(request.request_id)
    options, count, returns_ids = request.response_options(), request.n, request.return_media_ids
    submitting = partial(
        submit_request,
        serving,
        request_id=call.request_id,
        sampling=request.sampling(),
        tenant=request.tenant(call.tenant),
        parsing=request.parsing(),
        priority=request.priority,
        opening=ConversationPrefix.of_chat(request.messages) if serving.fleet.has_choice else None,
        kind=StreamedAnswer if is_streamed else BufferedAnswer,
        account=call.account,
    )
    reading = call.read_chat(request)
    del request  # the answer must not keep its base64: only `reading` has it
    parsed_request = await reading
    media_ids = [public_id(content) for content in parsed_request.contents] if returns_ids else None
    if on_read is not None:
        await on_read(parsed_request)
    beginning = submitting(parsed_request)
    del parsed_request  # nor must this frame keep the media
    stream, prompt = await beginning
    head = answer_head("chatcmpl", name, serving)
    decode = serving.pipeline.tokenizer.decode
    answer = ChatResponse(head, prompt, decode, count=count, options=options, role=role, media_ids=media_ids)
    return BegunChat(stream, answer, head, name, is_streamed, media_ids)


async def begin_translated(call: Call, request: Translated[Any], on_read: OnRead | None = None) -> BegunChat:
    """Submit the chat that a request of another API is. Errors name the fields of that request."""
    with request.terms.reworded():
        return await begin_chat(call, request.take(), on_read)


async def count_tokens(call: Call, request: Translated[Any]) -> int:
    """The number of tokens of a chat's prompt, with its items."""
    serving = call.serving
    with request.terms.reworded():
        parsed_request = await call.read_chat(request.take(), "inspect")
        rendered = await serving.pipeline.inspector.render(parsed_request, serving.fleet.holding)
    return len(rendered.prompt.token_ids)


def answer_head(kind: str, name: str, serving: ServedModel) -> Head:
    """Return the fields that an answer of this kind begins with."""
    return Head(f"{kind}-{name}", serving.model, f"semel-{serving.contract.fingerprint[:8]}")
