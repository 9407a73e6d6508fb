"""Errors in the form of the API that a request was sent to: under `/v1/messages` Anthropic's, else OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope
from typing_extensions import TypedDict

from semel.errors import SemelError, excerpt
from semel.web.errors import ErrorShape, error_body, error_response, http_error_response

__all__ = [
    "MESSAGES",
    "MessagesErrorBody",
    "MessagesFault",
    "error_shape",
    "http_refusal",
    "messages_error_body",
    "name_route",
    "refusal",
]

MESSAGES: Final = "/v1/messages"
"""The route of Anthropic's API. What lies under it belongs to that API too."""

_VERSION: Final = "/v1"

MessagesFaultType = Literal[
    "api_error",
    "authentication_error",
    "invalid_request_error",
    "not_found_error",
    "overloaded_error",
    "rate_limit_error",
    "request_too_large",
    "timeout_error",
]
_TYPES: Final[Mapping[int, MessagesFaultType]] = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessagesFault(TypedDict):
    """What is wrong, as Anthropic's clients read it."""

    type: MessagesFaultType
    message: str
    code: str
    """The code of the same error in OpenAI's shape, which tells more than the type."""


class MessagesErrorBody(TypedDict):
    """An error as Anthropic's clients read it."""

    type: Literal["error"]
    error: MessagesFault


def messages_error_body(
    message: str,
    *,
    code: str,
    status: int,
    param: str | None = None,  # noqa: ARG001 it has no place in this shape
) -> MessagesErrorBody:
    """An error as Anthropic's clients read it."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message, "code": code}}


def error_shape(path: str) -> ErrorShape:
    """The shape of errors of the API that a path belongs to."""
    return messages_error_body if f"{path}/".startswith(f"{MESSAGES}/") else error_body


def refusal(error: SemelError, scope: Scope) -> Response:
    """The response to a request that ended with an error."""
    return error_response(error, shape=error_shape(scope["path"]))


def http_refusal(error: HTTPException, scope: Scope) -> Response:
    """The response to a request that no route takes. It names the path, and the usual mistake in a base URL."""
    if error.status_code == 404:
        error = HTTPException(404, _no_such_route(scope), error.headers)
    return http_error_response(error, shape=error_shape(scope["path"]))


def name_route(scope: Scope) -> None:
    """Put the route that a request would have reached into its scope, for metrics and logs."""
    if (route := _route(scope, scope["path"])) is not None:
        scope["route"] = route


def _no_such_route(scope: Scope) -> str:
    """Say that a path leads nowhere, and what is wrong with a base URL that has `/v1` once too often or not at all."""
    path = scope["path"]
    remedy = "GET /openapi.json lists the routes"
    if path.startswith(f"{_VERSION}{_VERSION}/") and _route(scope, path.removeprefix(_VERSION)) is not None:
        remedy = "leave one /v1 out of the base URL"
    elif _route(scope, _VERSION + path) is not None:
        remedy = "let the base URL end with /v1"
    return f"{excerpt(path)}: no such route; {remedy}"


def _route(scope: Scope, path: str) -> Any:
    """The first route that takes a path, by any method."""
    routes = getattr(scope.get("app"), "routes", ())
    at_path = {**scope, "path": path}
    return next((route for route in routes if route.matches(at_path)[0] is not Match.NONE), None)
