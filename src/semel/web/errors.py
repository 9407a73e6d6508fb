"""Errors become responses here and nowhere else, in the shape that OpenAI's clients read.

A client gets only messages that are meant for it: the text of a `RequestError` or a `ServiceError`. Any other error is
logged, and the client gets a generic message.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, Protocol

from starlette.exceptions import HTTPException
from starlette.responses import Response
from typing_extensions import TypedDict

from semel.errors import RequestError, SemelError, ServiceError, UnsupportedEncoding
from semel.telemetry.request_context import tell_fault
from semel.web.responses import json_response

__all__ = [
    "RETRIED",
    "ErrorBody",
    "ErrorShape",
    "Fault",
    "error_body",
    "error_response",
    "http_error_response",
    "public_error",
    "public_error_body",
]

RETRIED: Final = frozenset({429, 503})
"""The statuses after which a client may retry the same request."""

logger = logging.getLogger(__name__)


class Fault(TypedDict):
    """What is wrong."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    """The field of the request that is at fault, where it is one."""

    code: str


class ErrorBody(TypedDict):
    """An error as OpenAI's clients read it."""

    error: Fault


class ErrorShape(Protocol):
    """Makes the body of an error in the shape of one API."""

    def __call__(self, message: str, *, code: str, status: int, param: str | None = None) -> Mapping[str, Any]:
        """Return the body."""
        ...


def error_body(message: str, *, code: str, status: int, param: str | None = None) -> ErrorBody:
    """An error as OpenAI's clients read it."""
    kind: Literal["invalid_request_error", "server_error"] = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def public_error(error: SemelError, *, process: str = "frontend") -> RequestError | ServiceError:
    """Return the error that a client of this process may read. Records its code in the request's span."""
    if not isinstance(error, RequestError | ServiceError):
        logger.error("an internal error reached a client: %r", error)
        error = ServiceError(f"internal error; the {process}'s log says more")
    tell_fault(error)
    return error


def public_error_body(error: SemelError, shape: ErrorShape = error_body) -> Mapping[str, Any]:
    """Return the body of the error that a client may read."""
    return _body(public_error(error), shape)


def error_response(
    error: SemelError,
    *,
    process: str = "frontend",
    scatter: Callable[[], float] = random.random,
    shape: ErrorShape = error_body,
) -> Response:
    """Return the response to a request that ended with an error. `scatter` draws from 0 to 1, for `Retry-After`."""
    public = public_error(error, process=process)
    return json_response(_body(public, shape), public.status, _headers(public, scatter))


def http_error_response(
    error: HTTPException, *, code: str = "invalid_request", shape: ErrorShape = error_body
) -> Response:
    """Return the response to a request that no route takes, or that a route refuses with a status."""
    body = shape(str(error.detail), code=code, status=error.status_code)
    return json_response(body, error.status_code, error.headers)


def _body(error: RequestError | ServiceError, shape: ErrorShape) -> Mapping[str, Any]:
    param = error.param if isinstance(error, RequestError) else None
    return shape(str(error), code=error.code, status=error.status, param=param)


def _headers(error: RequestError | ServiceError, scatter: Callable[[], float]) -> Mapping[str, str] | None:
    """Return what tells a client how the same request may be answered, if it may."""
    if isinstance(error, UnsupportedEncoding):
        return {"Accept-Encoding": error.accepted}
    if error.status not in RETRIED or not isinstance(error, ServiceError):
        return None
    # Scattered up to twice that time: clients that were refused together must not come back together.
    return {"Retry-After": f"{max(1, round(error.retry_after_s * (1 + scatter())))}"}
