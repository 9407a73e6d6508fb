"""Errors and ids in the form of the API that a request was sent to: under `/v1/messages` Anthropic's, else OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope
from typing_extensions import TypedDict

from semel.errors import SemelError
from semel.frontend.http.route_names import no_such_route
from semel.web.errors import ErrorShape, error_body, error_response, http_error_response

__all__ = [
    "MESSAGES",
    "MessagesErrorBody",
    "MessagesFault",
    "error_shape",
    "http_refusal",
    "id_headers",
    "messages_error_body",
    "refusal",
]

MESSAGES: Final = "/v1/messages"
"""The route of Anthropic's API. What lies under it belongs to that API too."""

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


class MessagesErrorBody(TypedDict):
    """An error as Anthropic's clients read it."""

    type: Literal["error"]
    error: MessagesFault


def messages_error_body(
    message: str,
    *,
    code: str,  # noqa: ARG001 it has no place in this shape
    status: int,
    param: str | None = None,  # noqa: ARG001
) -> MessagesErrorBody:
    """An error as Anthropic's clients read it."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_shape(path: str) -> ErrorShape:
    """The shape of errors of the API that a path belongs to."""
    return messages_error_body if _is_messages(path) else error_body


def id_headers(path: str) -> tuple[bytes, ...]:
    """The headers in which clients of the API that a path belongs to look for a request's id."""
    return (b"x-request-id", b"request-id") if _is_messages(path) else (b"x-request-id",)


def refusal(error: SemelError, scope: Scope) -> Response:
    """The response to a request that ended with an error."""
    return error_response(error, shape=error_shape(scope["path"]))


def _is_messages(path: str) -> bool:
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def http_refusal(error: HTTPException, scope: Scope) -> Response:
    """The response to a request that no route takes. It names the path, and the usual mistake in a base URL."""
    if error.status_code == 404:
        error = HTTPException(404, no_such_route(scope), error.headers)
    return http_error_response(error, shape=error_shape(scope["path"]))
