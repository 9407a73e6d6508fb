"""The routes that execute: chats and text completions, whole or as streams of events."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, TypeAdapter

from semel.core import Tenant
from semel.engine import Stream
from semel.errors import RequestError, ServiceError
from semel.frontend.access import tenant_name
from semel.frontend.answers import Answer, error_body
from semel.frontend.continuations import Continuation
from semel.frontend.events import DONE, EventStream, event, merged
from semel.frontend.exchange import as_json, parse, read, unless_disconnected
from semel.frontend.execution import execute
from semel.frontend.requests import ChatCompletionRequest, CompletionRequest
from semel.frontend.service import Service, Serving

__all__ = ["completion_routes"]

_CHAT: Final = TypeAdapter(ChatCompletionRequest)
_COMPLETION: Final = TypeAdapter(CompletionRequest)


def completion_routes(service: Service) -> APIRouter:
    """The routes for chats and completions."""
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=_schema(ChatCompletionRequest))
    async def chat_completions(request: Request) -> Response:
        """Answer a chat, whole or as a stream of events."""
        asked = parse(await read(request, service.max_body_bytes), _CHAT)
        serving = service.serving()
        serving.check_model(asked.model)
        return await unless_disconnected(request, _chat(serving, asked, asked.tenant(tenant_name(request))))

    @router.post("/v1/completions", openapi_extra=_schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Go on with one prompt or several, whole or as a stream of events."""
        asked = parse(await read(request, service.max_body_bytes), _COMPLETION)
        serving = service.serving()
        serving.check_model(asked.model)
        return await unless_disconnected(request, _complete(serving, asked, asked.tenant(tenant_name(request))))

    return router


def _schema(body: type[BaseModel]) -> dict[str, Any]:
    return {"requestBody": {"content": {"application/json": {"schema": body.model_json_schema()}}, "required": True}}


async def _chat(serving: Serving, asked: ChatCompletionRequest, tenant: Tenant) -> Response:
    request_id = uuid.uuid4().hex
    stream, prompt_ids = await execute(
        serving,
        await serving.pipeline.read_chat(asked.chat(), tenant),
        request_id=request_id,
        sampling=asked.sampling(),
        tenant=tenant,
    )
    answer = Answer(request_id, serving.model, prompt_ids, serving.pipeline.tokenizer.decode, count=asked.n)
    if asked.stream:
        return EventStream([stream], _ended(_chat_events(stream, answer, asked)))
    try:
        async for output in stream:
            answer.add(output)
    finally:
        await stream.close()
    return as_json(answer.whole(logprobs=asked.logprobs, token_ids=asked.return_token_ids))


async def _chat_events(stream: Stream, answer: Answer, asked: ChatCompletionRequest) -> AsyncIterator[bytes]:
    for chunk in answer.begin():
        yield event(chunk)
    async for output in stream:
        yield event(answer.chunk(output, logprobs=asked.logprobs, token_ids=asked.return_token_ids))
    if asked.stream_options is not None and asked.stream_options.include_usage:
        yield event(answer.usage_chunk())


async def _complete(serving: Serving, asked: CompletionRequest, tenant: Tenant) -> Response:
    request_id = uuid.uuid4().hex
    streams: list[Stream] = []
    prompts: list[Sequence[int]] = []
    handed_over = False
    try:
        for number, prompt in enumerate(asked.prompts()):
            stream, prompt_ids = await execute(
                serving,
                serving.pipeline.read_completion(prompt, add_special_tokens=asked.add_special_tokens),
                request_id=f"{request_id}-{number}",
                sampling=asked.sampling(),
                tenant=tenant,
            )
            streams.append(stream)
            prompts.append(prompt_ids)
        decode = serving.pipeline.tokenizer.decode
        answer = Continuation(request_id, serving.model, prompts, decode, count=asked.n)
        if asked.stream:
            handed_over = True
            return EventStream(streams, _ended(_completion_events(streams, answer, asked)))
        async for number, output in merged(streams):
            answer.add(number, output)
    finally:
        if not handed_over:
            for stream in streams:
                await stream.close()
    return as_json(answer.whole(logprobs=asked.logprobs is not None, token_ids=asked.return_token_ids))


async def _completion_events(
    streams: Sequence[Stream], answer: Continuation, asked: CompletionRequest
) -> AsyncIterator[bytes]:
    logprobs = asked.logprobs is not None
    async for number, output in merged(streams):
        yield event(answer.chunk(number, output, logprobs=logprobs, token_ids=asked.return_token_ids))
    if asked.stream_options is not None and asked.stream_options.include_usage:
        yield event(answer.usage_chunk())


async def _ended(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The events, then the error that ended them if one did, then the end."""
    try:
        async for one in events:
            yield one
    except (RequestError, ServiceError) as error:
        yield event(error_body(str(error), code=error.code, status=error.status))
    yield DONE
