"""The OpenAPI document of a worker's admin address."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

from typing_extensions import TypedDict

from semel.core import Contract
from semel.errors import EngineDead, InvalidRequest, MediaTooLarge, NotReady, ServiceError
from semel.interchange.injection import Outcomes
from semel.web.openapi import JSON, TEXT, Codes, Schema, answer, document, refusals, shape, told_codes
from semel.web.responses import Readiness

__all__ = ["CODES", "CONTENT_TYPES", "Reset", "admin_document"]

CONTENT_TYPES: Final = ("application/octet-stream", "application/x-safetensors")

CODES: Final[Codes] = {
    401: {"invalid_admin_key": "No admin key came with the request, or another one."},
    403: {"no_admin_key": "The worker has no admin key, or this came from another host: nothing can be changed here."},
    415: {"unsupported_content_type": "The body is not said to be a safetensors file."},
}
"""The errors that only the admin address has."""

_ERRORS: Final[Codes] = {
    **CODES,
    **told_codes((InvalidRequest, MediaTooLarge, ServiceError, EngineDead, NotReady)),
}
_KEY: Final = "The key of the worker's --admin-key-file."


class Reset(TypedDict):
    """The caches are empty."""

    reset: Literal[True]


def admin_document() -> dict[str, Any]:
    """Return what can be asked for, and what is answered."""
    file: Schema = {"type": "string", "format": "binary"}
    body = {"required": True, "content": {kind: {"schema": file} for kind in CONTENT_TYPES}}
    guarded = _ERRORS.keys() - {400, 413, 415}
    paths = {
        "/health": {"get": _operation("Whether the process is alive.", {})},
        "/ready": {"get": _readiness()},
        "/metrics": {"get": _operation("Counters for Prometheus.", {TEXT: {"type": "string"}})},
        "/v1/mm_cache/contract": {
            "get": _operation("What features the engine takes.", {JSON: shape(Contract)}, guarded)
        },
        "/v1/mm_cache/inject": {
            "post": {
                **_operation("Hold features under digests.", {JSON: shape(Outcomes)}, _ERRORS),
                "requestBody": body,
            }
        },
        "/v1/mm_cache/reset": {"post": _operation("Forget all features.", {JSON: shape(Reset)}, guarded)},
    }
    return document("semel worker", paths, codes=_ERRORS, key=_KEY)


def _readiness() -> dict[str, Any]:
    body = {JSON: shape(Readiness)}
    responses = {"200": answer("Requests are served.", body), "503": answer("Not any more.", body)}
    return {"summary": "Whether requests are served; if not, why.", "responses": responses}


def _operation(summary: str, content: Mapping[str, Schema], refused: Iterable[int] = ()) -> dict[str, Any]:
    statuses = tuple(refused)
    operation = {"summary": summary, "responses": {"200": answer("What was asked for.", content), **refusals(statuses)}}
    return {**operation, "security": [{"key": []}]} if statuses else operation
