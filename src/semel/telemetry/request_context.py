"""The request context: the request that a task works for. Log lines and spans take their ids from it.

Tasks inherit it from the task that starts them. A task that outlives its request, or works for several requests, must
not inherit it: it must start outside a request, or in a context passed to it.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Final

from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span, Tracer, set_span_in_context
from opentelemetry.util.types import AttributeValue

from semel.core import Trace
from semel.errors import RequestError, ServiceError
from semel.telemetry.spans import NO_TRACING, Tracing, fail_span
from semel.telemetry.stages import Stage, Timings

__all__ = [
    "RequestContext",
    "current_request",
    "current_span",
    "current_tenant",
    "entered",
    "entered_as",
    "own_id",
    "record_child",
    "spanning",
    "tell_fault",
    "traced",
]


@dataclass(frozen=True, slots=True)
class RequestContext:
    """A request in progress."""

    request_id: str
    """semel's own id, which is unique."""

    client_id: str | None = None
    """The client's id; other clients may use the same."""

    span: Span = INVALID_SPAN
    tracer: Tracer = NO_TRACING.tracer
    """Makes the children of the span."""

    tenant: str = ""
    """Of its API key, once that is known."""


_CURRENT_REQUEST: Final[ContextVar[RequestContext | None]] = ContextVar("semel_request_in_hand", default=None)


def current_request() -> RequestContext | None:
    """Return the request that this task works for."""
    return _CURRENT_REQUEST.get()


def own_id() -> str:
    """Return the id of the current request; a new id without one."""
    return uuid.uuid4().hex if (request := _CURRENT_REQUEST.get()) is None else request.request_id


def current_span() -> Span:
    """Return the span of the current request."""
    return INVALID_SPAN if (request := _CURRENT_REQUEST.get()) is None else request.span


def current_tenant() -> str:
    """Return the tenant of the current request; empty without one."""
    return "" if (request := _CURRENT_REQUEST.get()) is None else request.tenant


@contextmanager
def entered(request: RequestContext) -> Iterator[None]:
    """Work for a request within this context."""
    token = _CURRENT_REQUEST.set(request)
    try:
        yield
    finally:
        _CURRENT_REQUEST.reset(token)


@contextmanager
def entered_as(tenant: str) -> Iterator[None]:
    """Go on with the current request, whose tenant is now known."""
    if (request := _CURRENT_REQUEST.get()) is None:
        yield
        return
    with entered(replace(request, tenant=tenant)):
        yield


@contextmanager
def spanning(tracing: Tracing, name: str, request_id: str, trace: Trace | None) -> Iterator[None]:
    """Work for a request of another process, in a new span that is part of its trace."""
    span = tracing.begin(name, {} if trace is None else trace.headers)
    span.set_attribute("semel.request.id", request_id)
    with entered(RequestContext(request_id, span=span, tracer=tracing.tracer)):
        try:
            yield
        except asyncio.CancelledError:
            span.add_event("aborted")
            raise
        finally:
            span.end()


def record_child(name: str, seconds: float, attributes: Mapping[str, AttributeValue] | None = None) -> None:
    """Add a child to the current request's span that ends now and took this long, if the span is recorded."""
    request = _CURRENT_REQUEST.get()
    if request is not None and request.span.is_recording():
        parent, now = set_span_in_context(request.span, Context()), time.time_ns()
        child = request.tracer.start_span(name, parent, attributes=attributes, start_time=now - int(seconds * 1e9))
        child.end(now)


def tell_fault(error: RequestError | ServiceError) -> None:
    """Add the code of an error to the current span; only a server error marks the span as failed."""
    span = current_span()
    if error.status >= 500:
        fail_span(span, error.code)
    elif span.is_recording():
        span.set_attribute("error.type", error.code)


def traced(timings: Timings) -> Timings:
    """Also create a span for each stage, as a child of the request's span."""

    def tell(seconds: float, stage: Stage) -> None:
        timings(seconds, stage)
        if (request := _CURRENT_REQUEST.get()) is not None and request.span.is_recording():
            record_child(stage, seconds)

    return tell
