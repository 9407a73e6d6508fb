"""The routes that generate: chats and text completions, complete or as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from msgspec import UNSET
from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from semel.aio import concurrently
from semel.core import Layout, Prompt
from semel.engine import Stream
from semel.fleet.affinity import ConversationPrefix
from semel.fleet.stream import BufferedAnswer, StreamedAnswer
from semel.frontend.api.openai.chat_response import ChatCompletion, ChatCompletionChunk
from semel.frontend.api.openai.completion_response import CompletionResponse, Echo, TextCompletion, TextCompletionChunk
from semel.frontend.api.openai.requests import ChatCompletionRequest, CompletionRequest, InvocationRequest
from semel.frontend.api.shared.logprobs import Decode
from semel.frontend.execution import submit_request
from semel.frontend.http.sse import EventStream, event, merged, respond
from semel.frontend.routes.call import Call, read_prompt_json, serve_call
from semel.frontend.routes.chat import answer_head, begin_chat
from semel.frontend.routes.openapi import DocumentedRoute, takes
from semel.frontend.service import FrontendState
from semel.render.offload import run_if_heavy
from semel.web.openapi import EVENTS, JSON, events_of, shape
from semel.web.responses import json_response

__all__ = ["completion_routes"]

_CHAT: Final = TypeAdapter(ChatCompletionRequest)
_COMPLETION: Final = TypeAdapter(CompletionRequest)
_EITHER: Final[TypeAdapter[ChatCompletionRequest | CompletionRequest]] = TypeAdapter(InvocationRequest)
_EITHER_OPERATION: Final = takes(
    _EITHER,
    {JSON: shape(ChatCompletion, TextCompletion), EVENTS: events_of(ChatCompletionChunk, TextCompletionChunk)},
    named=True,
)
_CHAT_OPERATION: Final = takes(_CHAT, {JSON: shape(ChatCompletion), EVENTS: events_of(ChatCompletionChunk)}, named=True)
_TEXT_OPERATION: Final = takes(
    _COMPLETION, {JSON: shape(TextCompletion), EVENTS: events_of(TextCompletionChunk)}, named=True
)


def completion_routes(service: FrontendState) -> list[DocumentedRoute]:
    """The routes for chats and completions."""

    async def chat_completions(request: Request) -> Response:
        """Answer a chat, whole or as a stream of events."""
        return await serve_call(request, service, _CHAT, _chat)

    async def completions(request: Request) -> Response:
        """Go on with one prompt or several, whole or as a stream of events."""
        return await serve_call(request, service, _COMPLETION, _complete, read_prompt_json)

    async def invocations(request: Request) -> Response:
        """Answer a chat or go on with a prompt, whichever the body is: the route of SageMaker's containers."""
        return await serve_call(request, service, _EITHER, _invoke, read_prompt_json)

    return [
        DocumentedRoute("/v1/chat/completions", chat_completions, methods=["POST"], operation=_CHAT_OPERATION),
        DocumentedRoute("/v1/completions", completions, methods=["POST"], operation=_TEXT_OPERATION),
        DocumentedRoute("/invocations", invocations, methods=["POST"], operation=_EITHER_OPERATION),
    ]


async def _chat(call: Call, request: ChatCompletionRequest) -> Response:
    beginning = begin_chat(call, request)
    del request  # it has the media
    begun = await beginning
    return await respond(begun.stream, begun.answer, streamed=begun.is_streamed)


async def _invoke(call: Call, request: ChatCompletionRequest | CompletionRequest) -> Response:
    answering = _chat(call, request) if isinstance(request, ChatCompletionRequest) else _complete(call, request)
    del request  # it has the media
    return await answering


async def _complete(call: Call, request: CompletionRequest) -> Response:
    serving = call.serving
    if (pooling := serving.contract.pooling) is not UNSET:
        serving.refuse_to_generate(pooling)
    submitted: dict[int, tuple[Stream, Prompt]] = {}
    handed_over = False
    try:
        await _submit_all(call, request, submitted)
        streams = [submitted[number][0] for number in range(len(submitted))]
        prompts = [submitted[number][1] for number in range(len(submitted))]
        call.account.keep(0)  # from now on the request holds only prompts, whose size the model limits
        if request.stream:
            call.account.close()
        head = answer_head("cmpl", call.answer_id(request.request_id), serving)
        decode = serving.pipeline.tokenizer.decode
        echo = await run_if_heavy(partial(_echo, request, prompts, decode), light=serving.pipeline.tokenizer.is_local)
        answer = CompletionResponse(
            head, prompts, decode, count=request.n, options=request.response_options(), echo=echo
        )
        if request.stream:
            handed_over = True
            return EventStream(streams, _completion_events(streams, answer))
        async for number, output in merged(streams):
            answer.add(number, output)
    finally:
        if not handed_over:
            for stream, _ in submitted.values():
                await stream.close()
    return json_response(answer.whole())


async def _submit_all(
    call: Call, request: CompletionRequest, submitted: MutableMapping[int, tuple[Stream, Prompt]]
) -> None:
    """Submit each prompt under its number. None waits for another's acceptance, which a worker may send late."""
    serving, prompts = call.serving, request.prompts()
    turn = asyncio.Lock()  # the budget charges the memory in which a text becomes tokens: one does at a time

    async def submit(number: int) -> None:
        parsed = serving.pipeline.read_completion(
            prompts[number], add_special_tokens=request.add_special_tokens, room=call.text_room
        )

        async def assemble(layouts: Sequence[Layout]) -> Prompt:
            async with turn:
                return await parsed.assemble(layouts)

        submitted[number] = await submit_request(
            serving,
            replace(parsed, assemble=assemble),
            request_id=f"{call.request_id}-{number}",
            sampling=request.sampling(),
            tenant=request.tenant(call.tenant),
            priority=request.priority,
            opening=ConversationPrefix.of_prompt(prompts[number]),
            kind=StreamedAnswer if request.stream else BufferedAnswer,
            answer_account=call.account,
        )

    for prompt in prompts:
        serving.check_text(prompt)
    await concurrently(range(len(prompts)), submit, at_once=len(prompts))


async def _completion_events(streams: Sequence[Stream], answer: CompletionResponse) -> AsyncIterator[bytes]:
    async for number, output in merged(streams):
        for chunk in answer.chunks(number, output):
            yield event(chunk)
    for chunk in answer.closing():
        yield event(chunk)


def _echo(request: CompletionRequest, prompts: Sequence[Prompt], decode: Decode) -> Echo | None:
    """The texts that the choices begin with, if the client requested them: as sent, or decoded from their tokens."""
    if not request.echo:
        return None
    sent = zip(request.prompts(), prompts, strict=True)
    texts = [text if isinstance(text, str) else decode(prompt.token_ids) for text, prompt in sent]
    return Echo(texts, alone=not request.max_tokens)
