"""Responses in JSON."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.responses import Response
from typing_extensions import TypedDict

__all__ = ["Readiness", "json_response", "readiness_response"]


class Readiness(TypedDict):
    """Whether requests are served; if not, why."""

    ready: bool
    reason: str | None


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response in JSON."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def readiness_response(reason: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return the answer to a probe; without a reason against it, requests are served."""
    body: Readiness = {"ready": not reason, "reason": reason or None}
    return json_response(body, 503 if reason else 200, headers)
