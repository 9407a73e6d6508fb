"""The routes: OpenAI's API over HTTP. Thin: requests are read here, answers are shaped in `answers`."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping, MutableMapping
from contextlib import aclosing
from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from semel.engine import Stream, Submission
from semel.errors import InvalidRequest, MediaTooLarge, PromptTooLong, RequestError, SemelError, ServiceError
from semel.frontend.answers import Answer, error_body, model_list
from semel.frontend.requests import ChatCompletionRequest
from semel.frontend.service import Service, Serving
from semel.telemetry import Meter
from semel.telemetry.metrics import REQUESTS

__all__ = ["create_app"]

_CLIENT_CLOSED: Final = 499
"""The status that nobody reads, by the convention of nginx: the client had gone."""

logger = logging.getLogger(__name__)


def create_app(service: Service, meter: Meter) -> FastAPI:
    """The HTTP application of one frontend."""
    app = FastAPI(title="semel", docs_url=None, redoc_url=None)

    @app.exception_handler(SemelError)
    async def on_error(_: Request, error: SemelError) -> Response:
        return _error_response(error)

    @app.exception_handler(HTTPException)
    async def on_http_error(_: Request, error: HTTPException) -> Response:
        return _json(error_body(str(error.detail), code="invalid_request", status=error.status_code), error.status_code)

    @app.exception_handler(Exception)
    async def on_surprise(_: Request, error: Exception) -> Response:
        logger.error("a request failed in a way that we do not expect", exc_info=error)
        return _error_response(ServiceError("internal error; the frontend's log says more"))

    app.add_middleware(_Counted, meter=meter)

    @app.get("/health")
    async def health() -> Response:
        """Whether the process is alive."""
        return Response(status_code=200)

    @app.get("/ready")
    async def ready() -> Response:
        """Whether requests are served; if not, why."""
        body = {"ready": not service.reason, "reason": service.reason or None}
        return _json(body, status=503 if service.reason else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Counters for Prometheus."""
        return Response(meter.render(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> Response:
        """The model that is served."""
        serving = service.serving()
        return _json(model_list(serving.model, serving.contract.max_tokens, service.started))

    schema = {"content": {"application/json": {"schema": ChatCompletionRequest.model_json_schema()}}, "required": True}

    @app.post("/v1/chat/completions", openapi_extra={"requestBody": schema})
    async def chat_completions(request: Request) -> Response:
        """Answer a chat, whole or as a stream of events."""
        asked = _parse(await _read(request, service.max_body_bytes))
        serving = service.serving()
        _check_model(asked, serving)
        return await _unless_disconnected(request, _answer(serving, asked))

    return app


class _Counted:
    """Counts requests by route and status. Plain ASGI: a middleware of functions would hide that a client has gone."""

    def __init__(self, app: ASGIApp, meter: Meter) -> None:
        self._app = app
        self._meter = meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def count(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "unknown")
                self._meter.count(REQUESTS, route, str(message["status"]))
            await send(message)

        await self._app(scope, receive, count)


class _EventStream(StreamingResponse):
    """Server-sent events, which close their stream even if not one of them was ever sent."""

    def __init__(self, stream: Stream, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._stream.close()


async def _answer(serving: Serving, asked: ChatCompletionRequest) -> Response:
    draft = await serving.pipeline.read_chat(asked.chat(), asked.tenant())
    worker = serving.fleet.choose(draft.media)
    rendered = await serving.pipeline.render(draft, worker.holding)
    request_id = uuid.uuid4().hex
    prompt_ids = rendered.prompt.token_ids
    _check_length(len(prompt_ids), serving)
    submission = Submission(request_id, rendered.prompt, rendered.features, asked.sampling(), asked.cache_salt)
    make = rendered.make
    del rendered, draft
    stream = await serving.fleet.submit(worker, submission, make)
    del submission, make  # with them go features and media: the worker has what it needs
    answer = Answer(request_id, serving.model, prompt_ids, serving.pipeline.tokenizer.decode, count=asked.n)
    if asked.stream:
        return _EventStream(stream, _events(stream, answer, asked))
    try:
        async for output in stream:
            answer.add(output)
    finally:
        await stream.close()
    return _json(answer.whole(logprobs=asked.logprobs, token_ids=asked.return_token_ids))


async def _events(stream: Stream, answer: Answer, asked: ChatCompletionRequest) -> AsyncIterator[bytes]:
    """The answer as server-sent events."""
    try:
        for chunk in answer.begin():
            yield _event(chunk)
        async for output in stream:
            yield _event(answer.chunk(output, logprobs=asked.logprobs, token_ids=asked.return_token_ids))
        if asked.stream_options is not None and asked.stream_options.include_usage:
            yield _event(answer.usage_chunk())
    except (RequestError, ServiceError) as error:
        yield _event(error_body(str(error), code=error.code, status=error.status))
    yield b"data: [DONE]\n\n"


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The response that `work` makes; it is cancelled as soon as the client has gone."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        logger.info("a client went away before its answer")
        return Response(status_code=_CLIENT_CLOSED)
    finally:
        watching.cancel()
        working.cancel()
        await asyncio.wait({working})


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _read(request: Request, max_bytes: int) -> bytes:
    """The body, given up on as soon as it is over the limit, whatever its announced length."""
    parts: list[bytes] = []
    size = 0
    async with aclosing(request.stream()) as chunks:
        async for chunk in chunks:
            size += len(chunk)
            if size > max_bytes:
                raise MediaTooLarge(f"the request is over {max_bytes:,} bytes; raise it with --max-body-bytes")
            parts.append(chunk)
    return b"".join(parts)


def _parse(body: bytes) -> ChatCompletionRequest:
    try:
        return ChatCompletionRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise InvalidRequest(f"{where}: {first['msg']}") from None


def _check_length(tokens: int, serving: Serving) -> None:
    """Before the prompt is sent: one that is far too long would hold up the link for all others."""
    if tokens >= (limit := serving.contract.max_tokens):
        raise PromptTooLong(f"the prompt has {tokens:,} tokens; {serving.model} takes {limit:,} with the answer")


def _check_model(asked: ChatCompletionRequest, serving: Serving) -> None:
    if asked.model is not None and asked.model != serving.model:
        raise InvalidRequest(f"model: {asked.model!r} is not served here; {serving.model!r} is")


def _error_response(error: SemelError) -> Response:
    if not isinstance(error, (RequestError, ServiceError)):
        logger.error("an internal error reached a client: %r", error)
        return _json(error_body("internal error; the frontend's log says more", code="internal_error", status=500), 500)
    headers = {"Retry-After": "1"} if error.status == 503 else None
    return _json(error_body(str(error), code=error.code, status=error.status), error.status, headers)


def _json(body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
