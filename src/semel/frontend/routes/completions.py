"""The routes that execute: chats and text completions, whole or as streams of events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Final

from fastapi import APIRouter, Request, Response
from pydantic import TypeAdapter

from semel.core import Prompt
from semel.engine import Stream
from semel.fleet.affinity import Opening
from semel.fleet.fleet import FleetStream, WholeStream
from semel.frontend.api.chat_response import Answer, Head
from semel.frontend.api.completion_response import Continuation, Echo
from semel.frontend.api.logprobs import Decode
from semel.frontend.api.requests import ChatCompletionRequest, CompletionRequest
from semel.frontend.api.shapes import ChatCompletion, ChatCompletionChunk, TextCompletion, TextCompletionChunk
from semel.frontend.execution import execute
from semel.frontend.http.body import as_json
from semel.frontend.http.respond import answered, ended, wished_id
from semel.frontend.http.sse import EventStream, event, merged
from semel.frontend.routes.call import Call, handle
from semel.frontend.routes.openapi import takes
from semel.frontend.service import Service, Serving
from semel.web.openapi import EVENTS, JSON, events_of, shape

__all__ = ["completion_routes"]

_CHAT: Final = TypeAdapter(ChatCompletionRequest)
_COMPLETION: Final = TypeAdapter(CompletionRequest)
_CHAT_ANSWERS: Final = {JSON: shape(ChatCompletion), EVENTS: events_of(ChatCompletionChunk)}
_TEXT_ANSWERS: Final = {JSON: shape(TextCompletion), EVENTS: events_of(TextCompletionChunk)}


def completion_routes(service: Service) -> APIRouter:
    """The routes for chats and completions."""
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=takes(_CHAT, _CHAT_ANSWERS, named=True))
    async def chat_completions(request: Request) -> Response:
        """Answer a chat, whole or as a stream of events."""
        return await handle(request, service, _CHAT, partial(_chat, wished_id(request)))

    @router.post("/v1/completions", openapi_extra=takes(_COMPLETION, _TEXT_ANSWERS, named=True))
    async def completions(request: Request) -> Response:
        """Go on with one prompt or several, whole or as a stream of events."""
        return await handle(request, service, _COMPLETION, partial(_complete, wished_id(request)))

    return router


async def _chat(wished: str | None, call: Call, asked: ChatCompletionRequest) -> Response:
    request_id, serving = call.request_id, call.serving
    dialogue, role = asked.dialogue(), asked.role
    reading, opening = call.read_chat(asked), Opening.of_chat(asked.messages)
    asked = asked.model_copy(update={"messages": []})  # the answer must not hold their base64: `reading` alone has it
    stream, prompt = await execute(
        serving,
        await reading,
        request_id=request_id,
        sampling=asked.sampling(),
        tenant=asked.tenant(call.tenant),
        dialogue=dialogue,
        priority=asked.priority,
        opening=opening,
        kind=FleetStream if asked.stream else WholeStream,
        account=call.account,
    )
    head = _head("chatcmpl", wished or asked.request_id or request_id, serving)
    decode = serving.pipeline.tokenizer.decode
    answer = Answer(head, prompt, decode, count=asked.n, showing=asked.showing(), role=role)
    return await answered(stream, answer, streamed=asked.stream)


async def _complete(wished: str | None, call: Call, asked: CompletionRequest) -> Response:
    request_id, serving = call.request_id, call.serving
    streams: list[Stream] = []
    prompts: list[Prompt] = []
    handed_over = False
    try:
        for number, prompt in enumerate(asked.prompts()):
            serving.check_text(prompt)
            stream, rendered = await execute(
                serving,
                serving.pipeline.read_completion(prompt, add_special_tokens=asked.add_special_tokens),
                request_id=f"{request_id}-{number}",
                sampling=asked.sampling(),
                tenant=asked.tenant(call.tenant),
                priority=asked.priority,
                opening=Opening.of_prompt(prompt),
                kind=FleetStream if asked.stream else WholeStream,
            )
            streams.append(stream)
            prompts.append(rendered)
        call.account.close()  # what is held from now on are prompts that the model takes
        head = _head("cmpl", wished or asked.request_id or request_id, serving)
        decode = serving.pipeline.tokenizer.decode
        echo = _echo(asked, prompts, decode)
        answer = Continuation(head, prompts, decode, count=asked.n, showing=asked.showing(), echo=echo)
        if asked.stream:
            handed_over = True
            return EventStream(streams, ended(_completion_events(streams, answer)))
        async for number, output in merged(streams):
            answer.add(number, output)
    finally:
        if not handed_over:
            for stream in streams:
                await stream.close()
    return as_json(answer.whole())


async def _completion_events(streams: Sequence[Stream], answer: Continuation) -> AsyncIterator[bytes]:
    async for number, output in merged(streams):
        for chunk in answer.chunks(number, output):
            yield event(chunk)
    for chunk in answer.closing():
        yield event(chunk)


def _head(kind: str, name: str, serving: Serving) -> Head:
    return Head(f"{kind}-{name}", serving.model, f"semel-{serving.contract.fingerprint[:8]}")


def _echo(asked: CompletionRequest, prompts: Sequence[Prompt], decode: Decode) -> Echo | None:
    """The texts to begin with, if that was asked for: as they were sent, or as their tokens read."""
    if not asked.echo:
        return None
    sent = zip(asked.prompts(), prompts, strict=True)
    texts = [text if isinstance(text, str) else decode(prompt.token_ids) for text, prompt in sent]
    return Echo(texts, alone=not asked.max_tokens)
