"""The HTTP application of a frontend: its routes put together, errors in OpenAI's shape, requests counted.

The routes that execute stand in `completions`, `transcriptions` and `generation`, those that only look in `inspection`,
those that nobody can use here in `unsupported`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, MutableMapping
from functools import partial
from importlib.metadata import version as installed_version
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from semel.core import Keyring
from semel.errors import Busy, NotReady, RequestError, SemelError
from semel.frontend.api.chat_response import error_body, model_list
from semel.frontend.api.shapes import ModelList, Readiness, Version
from semel.frontend.http.body import as_error, as_json
from semel.frontend.middleware.authentication import Authentication, tenant_name
from semel.frontend.middleware.concurrency import ConcurrencyLimit
from semel.frontend.middleware.request_context import RequestContextMiddleware
from semel.frontend.routes.completions import completion_routes
from semel.frontend.routes.generate import generation_routes
from semel.frontend.routes.openapi import DocumentedApp, looks, probes
from semel.frontend.routes.render import inspection_routes
from semel.frontend.routes.transcriptions import transcription_routes
from semel.frontend.routes.unsupported import unsupported_routes
from semel.frontend.service import FrontendState
from semel.telemetry import Meter
from semel.telemetry.meter import Sample
from semel.telemetry.metrics import MEDIA_IN_FLIGHT, MEDIA_IN_FLIGHT_LIMIT, REFUSALS, REQUESTS, REQUESTS_WAITING
from semel.telemetry.tracing import NO_TRACING, Tracing
from semel.web.openapi import JSON, TEXT, shape

__all__ = ["create_app"]

_READINESS: Final = {200: "Requests are served.", 503: "Not yet, or not any more."}


def create_app(
    service: FrontendState,
    meter: Meter,
    keys: Keyring | None = None,
    *,
    tracing: Tracing = NO_TRACING,
    log_requests: bool = True,
) -> FastAPI:
    """The HTTP application of one frontend; without keys it is open to everybody who reaches it."""
    app = DocumentedApp(secured=bool(keys))

    @app.exception_handler(SemelError)
    async def on_error(request: Request, error: SemelError) -> Response:
        answer = as_error(error)
        if isinstance(error, RequestError | Busy | NotReady):
            meter.count(REFUSALS, error.code)
            # What failed has the body: it must not wait with its answer.
            error.__traceback__ = error.__context__ = error.__cause__ = None
            await asyncio.sleep(service.refusal_wait_s(tenant_name(request)))
        return answer

    @app.exception_handler(HTTPException)
    async def on_http_error(_: Request, error: HTTPException) -> Response:
        body = error_body(str(error.detail), code="invalid_request", status=error.status_code)
        return as_json(body, error.status_code, error.headers)

    app.add_middleware(ConcurrencyLimit, gate=service.gate, meter=meter, wait_s=service.refusal_wait_s)
    app.add_middleware(Authentication, keys=keys or Keyring())
    app.add_middleware(RequestContextMiddleware, tracing=tracing, log_requests=log_requests)
    app.add_middleware(_Counted, meter=meter)  # outermost: what is refused counts as well

    @app.get("/health", openapi_extra=probes({200: ("It is alive.", {})}))
    async def health() -> Response:
        """Whether the process is alive."""
        return Response(status_code=200)

    @app.get(
        "/ready",
        openapi_extra=probes({status: (meaning, {JSON: shape(Readiness)}) for status, meaning in _READINESS.items()}),
    )
    async def ready() -> Response:
        """Whether requests are served; if not, why."""
        body: Readiness = {"ready": not service.reason, "reason": service.reason or None}
        return as_json(body, status=503 if service.reason else 200)

    @app.get("/metrics", openapi_extra=probes({200: ("In Prometheus' format.", {TEXT: {"type": "string"}})}))
    async def metrics() -> Response:
        """Counters for Prometheus."""
        return Response(meter.render(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/version", openapi_extra=probes({200: ("The version.", {JSON: shape(Version)})}))
    async def version() -> Response:
        """The version of semel."""
        body: Version = {"version": installed_version("semel")}
        return as_json(body)

    @app.get("/v1/models", openapi_extra=looks({JSON: shape(ModelList)}))
    async def models() -> Response:
        """The model that is served."""
        serving = service.serving()
        return as_json(model_list(serving.model, serving.contract.max_tokens, service.started))

    meter.watch(partial(_budget_samples, service))
    meter.watch(service.gate.samples)
    app.include_router(completion_routes(service))
    app.include_router(generation_routes(service))
    app.include_router(transcription_routes(service))
    app.include_router(inspection_routes(service))
    app.include_router(unsupported_routes())
    return app


def _budget_samples(service: FrontendState) -> Iterator[Sample]:
    budget = service.budget
    yield MEDIA_IN_FLIGHT, budget.in_flight, ()
    yield MEDIA_IN_FLIGHT_LIMIT, budget.limits.max_bytes, ()
    yield REQUESTS_WAITING, budget.requests, ()


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
