"""The HTTP application of a frontend: its routes put together, errors in OpenAI's shape, requests counted.

The routes that execute stand in `completions`, `transcriptions` and `generate`, those that only look in `render`, those
of files in `files`, those that nobody can use here in `unsupported`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import version as installed_version
from typing import Final, Literal, NotRequired

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from semel.core import Keyring
from semel.errors import Busy, NotReady, RequestError, SemelError
from semel.frontend.http.errors import http_refusal, refusal
from semel.frontend.http.ignored_fields import IGNORED_FIELDS_HEADER
from semel.frontend.limits import NO_CORS, CorsSettings
from semel.frontend.middleware.authentication import Authentication, tenant_name
from semel.frontend.middleware.concurrency import REFUSED, ConcurrencyLimit
from semel.frontend.middleware.refusal_rate import AbortThrottle, AddressThrottle
from semel.frontend.middleware.request_context import RequestContextMiddleware
from semel.frontend.routes.completions import completion_routes
from semel.frontend.routes.files import file_routes
from semel.frontend.routes.generate import generation_routes
from semel.frontend.routes.messages import messages_routes
from semel.frontend.routes.openapi import DocumentedApp, DocumentedRoute, looks, probes
from semel.frontend.routes.pooling import pooling_routes
from semel.frontend.routes.render import inspection_routes
from semel.frontend.routes.responses import responses_routes
from semel.frontend.routes.scoring import scoring_routes
from semel.frontend.routes.stored_responses import stored_response_routes
from semel.frontend.routes.transcriptions import transcription_routes
from semel.frontend.routes.unsupported import unsupported_routes
from semel.frontend.service import FrontendState
from semel.telemetry import Meter, metrics
from semel.telemetry.meter import Sample
from semel.telemetry.spans import NO_TRACING, Tracing
from semel.web.host_check import HostCheck
from semel.web.openapi import JSON, TEXT, shape
from semel.web.responses import Readiness, json_response, readiness_response

__all__ = ["Model", "ModelList", "Version", "create_app"]

_EXPOSED: Final = ("x-request-id", "request-id", "retry-after")

_READINESS: Final = {200: "Requests are served.", 503: "Not yet, or not any more."}


class Model(TypedDict):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["semel"]
    max_model_len: int
    root: NotRequired[str]
    """Of an adapter: what it was loaded from."""

    parent: NotRequired[str]
    """Of an adapter: the model that it is for."""


class ModelList(TypedDict):
    """The model that is served, under each of its names, and its adapters."""

    object: Literal["list"]
    data: list[Model]


class Version(TypedDict):
    """The version of semel."""

    version: str


def create_app(
    service: FrontendState,
    meter: Meter,
    keys: Keyring | None = None,
    *,
    tracing: Tracing = NO_TRACING,
    log_requests: bool = True,
    cors: CorsSettings = NO_CORS,
    allowed_hosts: Sequence[str] = (),
) -> DocumentedApp:
    """The HTTP application of one frontend; without keys it is open to everybody who reaches it.

    `allowed_hosts` are the hosts that requests may name; without any, all are.
    """
    count_refusal = partial(meter.count, metrics.REFUSALS)
    strangers = AddressThrottle(service.refusals)

    async def refuse(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            return http_refusal(error, request.scope)
        assert isinstance(error, SemelError)
        response = refusal(error, request.scope)
        # What failed has the body: it must not wait with its answer, nor for the garbage collector.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        if isinstance(error, RequestError | Busy | NotReady):
            meter.count(metrics.REFUSALS, error.code)
            request.scope[REFUSED] = True
            await asyncio.sleep(service.refusal_wait_s(tenant_name(request.scope)))
        return response

    meter.watch(partial(_budget_samples, service))
    meter.watch(service.limiter.samples)
    meter.watch(service.ignored_fields.samples)
    return DocumentedApp(
        [
            *_server_routes(service, meter),
            *completion_routes(service),
            *responses_routes(service),
            *messages_routes(service),
            *generation_routes(service),
            *pooling_routes(service),
            *scoring_routes(service),
            *transcription_routes(service),
            *file_routes(service),
            *inspection_routes(service),
            *unsupported_routes(),
            *stored_response_routes(service),  # last: any name is an id
        ],
        secured=bool(keys),
        closed=service.unknown_fields_mode == "refuse",
        middleware=[
            *_host_check(allowed_hosts, cors, count_refusal),
            *_cors(cors),
            # Outside of the rest: what is refused counts as well.
            Middleware(RequestContextMiddleware, tracing=tracing, meter=meter, log_requests=log_requests),
            Middleware(Authentication, keys=keys or Keyring(), count=count_refusal, wait_s=strangers.wait_s),
            Middleware(
                ConcurrencyLimit,
                limiter=service.limiter,
                meter=meter,
                wait_s=service.refusal_wait_s,
                aborts=AbortThrottle(lambda: service.refusals),
            ),
        ],
        refuse=refuse,
    )


def _host_check(allowed: Sequence[str], cors: CorsSettings, count: Callable[[str], None]) -> list[Middleware]:
    if not allowed:
        return []
    return [Middleware(HostCheck, allowed=allowed, origins=cors.allowed_origins, count=count, respond=refusal)]


def _cors(cors: CorsSettings) -> list[Middleware]:
    """Outermost: a browser asks without a key what a page may send, and a page can read errors too."""
    if not cors.allowed_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=cors.allowed_origins,
            allow_methods=cors.allowed_methods,
            allow_headers=cors.allowed_headers,
            allow_credentials=cors.allow_credentials,
            expose_headers=(*_EXPOSED, IGNORED_FIELDS_HEADER),
        )
    ]


def _server_routes(service: FrontendState, meter: Meter) -> list[DocumentedRoute]:
    """Make the routes by which the server reports on itself."""

    async def health(_: Request) -> Response:
        """Whether the process is alive."""
        return Response(status_code=200)

    async def ready(_: Request) -> Response:
        """Whether requests are served; if not, why."""
        return readiness_response(service.reason, service.identity)

    async def metrics(_: Request) -> Response:
        """Counters for Prometheus."""
        return Response(meter.render(), media_type=CONTENT_TYPE_LATEST)

    async def version(_: Request) -> Response:
        """The version of semel."""
        body: Version = {"version": installed_version("semel")}
        return json_response(body)

    async def models(request: Request) -> Response:
        """The model that is served, and the adapters that the key's tenant may use."""
        serving = service.serving()
        limit, created = serving.contract.max_tokens, service.started
        listed: list[Model] = [
            {"id": name, "object": "model", "created": created, "owned_by": "semel", "max_model_len": limit}
            for name in serving.names
        ]
        for name, one in service.adapters(tenant_name(request.scope)).items():
            listed.append({**listed[0], "id": name, "root": one.root, "parent": one.parent})
        body: ModelList = {"object": "list", "data": listed}
        return json_response(body)

    readiness = {status: (meaning, {JSON: shape(Readiness)}) for status, meaning in _READINESS.items()}
    text = {TEXT: {"type": "string"}}
    return [
        DocumentedRoute("/health", health, operation=probes({200: ("It is alive.", {})})),
        DocumentedRoute("/ping", health, methods=("GET", "POST")),
        DocumentedRoute("/ready", ready, operation=probes(readiness)),
        DocumentedRoute("/metrics", metrics, operation=probes({200: ("In Prometheus' format.", text)})),
        DocumentedRoute("/version", version, operation=probes({200: ("The version.", {JSON: shape(Version)})})),
        DocumentedRoute("/v1/models", models, operation=looks({JSON: shape(ModelList)})),
    ]


def _budget_samples(service: FrontendState) -> Iterator[Sample]:
    budget = service.budget
    yield metrics.MEDIA_IN_FLIGHT, budget.in_flight, ()
    yield metrics.MEDIA_IN_FLIGHT_LIMIT, budget.limits.max_bytes, ()
    yield metrics.REQUESTS_WAITING, budget.requests, ()
    for outcome, count in sorted(service.stored_responses.items()):
        yield metrics.STORED_RESPONSES, count, (outcome,)
    calls = _called_back(service)
    for code in sorted({code for code, _ in calls}):
        yield metrics.REQUESTS_CALLED_BACK, sum(count for (one, _), count in calls.items() if one == code), (code,)
    if service.metrics_per_tenant:
        for tenant, (nbytes, requests) in sorted(budget.by_tenant().items()):
            yield metrics.TENANT_MEDIA_IN_FLIGHT, nbytes, (tenant,)
            yield metrics.TENANT_REQUESTS_WAITING, requests, (tenant,)
        for tenant in sorted({tenant for _, tenant in calls}):
            count = sum(count for (_, one), count in calls.items() if one == tenant)
            yield metrics.TENANT_REQUESTS_CALLED_BACK, count, (tenant,)


def _called_back(service: FrontendState) -> Counter[tuple[str, str]]:
    """Count the requests that were called back, by the code of the error and by tenant."""
    places = {(Busy.code, tenant): count for tenant, count in service.limiter.called_back.items()}
    return Counter(service.budget.called_back) + Counter(places)
