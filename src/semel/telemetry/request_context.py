"""The request in hand: which one a task works for, so that its lines in the log and its spans can say so.

Tasks inherit it from those that start them. What outlives a request, or works for whoever comes next, must not: such a
task is started outside of one, or in the context that it was given.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from semel.core import Trace
from semel.errors import RequestError, ServiceError
from semel.telemetry.spans import NO_SPAN, Span
from semel.telemetry.stages import Stage, Timings
from semel.telemetry.tracing import Tracing

__all__ = ["RequestContext", "current_request", "current_span", "entered", "own_id", "spanning", "tell_fault", "traced"]


@dataclass(frozen=True, slots=True)
class RequestContext:
    """A request that is being handled."""

    request_id: str
    """Our own: no other has it."""

    client_id: str | None = None
    """What its client calls it; another's may be called the same."""

    span: Span = NO_SPAN


_CURRENT_REQUEST: Final[ContextVar[RequestContext | None]] = ContextVar("semel_request_in_hand", default=None)


def current_request() -> RequestContext | None:
    """The request that this task works for."""
    return _CURRENT_REQUEST.get()


def own_id() -> str:
    """The id of the request in hand; a new one where there is none."""
    return uuid.uuid4().hex if (request := _CURRENT_REQUEST.get()) is None else request.request_id


def current_span() -> Span:
    """The span of the request in hand."""
    return NO_SPAN if (request := _CURRENT_REQUEST.get()) is None else request.span


@contextmanager
def entered(request: RequestContext) -> Iterator[None]:
    """Work for a request."""
    token = _CURRENT_REQUEST.set(request)
    try:
        yield
    finally:
        _CURRENT_REQUEST.reset(token)


@contextmanager
def spanning(tracing: Tracing, name: str, request_id: str, trace: Trace | None) -> Iterator[None]:
    """Work for a request of another process, in a span of our own that is part of its trace."""
    span = tracing.begin(name, "server", {} if trace is None else trace.headers)
    span.note("semel.request.id", request_id)
    with entered(RequestContext(request_id, span=span)):
        try:
            yield
        except asyncio.CancelledError:
            span.event("aborted")
            raise
        finally:
            span.end()


def tell_fault(error: RequestError | ServiceError) -> None:
    """Let the span in hand have the code of the error that ended it; a client's fault is no failure of ours."""
    if error.status >= 500:
        current_span().fail(error.code)
    else:
        current_span().note("error.type", error.code)


def traced(timings: Timings) -> Timings:
    """Makes a span of each stage as well, in that of its request."""

    def tell(seconds: float, stage: Stage) -> None:
        timings(seconds, stage)
        current_span().child(stage, seconds)

    return tell
