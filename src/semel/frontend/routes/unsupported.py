"""The routes of OpenAI's and vLLM's servers that semel does not serve. The response of each names what to use instead.

They are not in the OpenAPI document, which describes what can be used. Nothing of such a request is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from semel.frontend.http.errors import error_shape
from semel.frontend.routes.openapi import DocumentedRoute
from semel.web.responses import json_response

__all__ = ["NOT_SUPPORTED", "UNSUPPORTED", "unsupported_routes"]

NOT_SUPPORTED: Final = "not_supported"
"""The code of the error. Its status is 404: the server works, and a retry does not help."""

_METHODS: Final = ("GET", "POST", "DELETE")
_CHAT: Final = "use /v1/chat/completions"
_CLASSIFY: Final = "use /classify of a model that is served with --runner pooling"
_LORA: Final = "send it to one worker's --admin-port, with its admin key; all do it"
_DERENDER: Final = "use /v1/chat/completions, which answers in text, or /detokenize"

UNSUPPORTED: Final[Mapping[str, str]] = {
    "/v1/responses/render": "use /v1/chat/completions/render",
    "/v1/responses/compact": "nothing is compacted; send fewer items to /v1/responses",
    "/v1/conversations": "there are no such objects; continue a response with previous_response_id",
    "/v1/responses/{response_id}/cancel": "nothing runs without its client: close the connection to abort it",
    "/v1/messages/batches": "send each request to /v1/messages",
    "/v1/messages/render": "use /v1/chat/completions/render",
    "/cohere/v2/chat": _CHAT,
    "/cohere/v2/chat/render": "use /v1/chat/completions/render",
    "/v1/chat/completions/batch": "send each chat to /v1/chat/completions; the engine batches them",
    "/v1/chat/completions/derender": _DERENDER,
    "/v1/completions/derender": _DERENDER,
    "/inference/v1/abort_requests": "close the connection of a request to abort it",
    "/generative_scoring": _CLASSIFY,
    "/v1/load_lora_adapter": _LORA,
    "/v1/unload_lora_adapter": _LORA,
    "/v1/audio/speech": "answers are text",
    "/v1/images/generations": "answers are text",
    "/v1/realtime": "send whole clips, to /v1/audio/transcriptions or in a chat",
    "/v1/batches": "run `semel batch` with the file, or send each request by itself",
    "/v1/moderations": _CLASSIFY,
}
"""The replacements, by path. The first matching path counts, so fixed paths come before those with parameters."""


def unsupported_routes() -> list[DocumentedRoute]:
    """A route for each of these paths."""
    return [DocumentedRoute(path, _refuse, methods=_METHODS) for path in UNSUPPORTED]


async def _refuse(request: Request) -> Response:
    path: str = request.scope["route"].path
    message = f"{path} is not supported: {UNSUPPORTED[path]}"
    return json_response(error_shape(path)(message, code=NOT_SUPPORTED, status=404), 404)
