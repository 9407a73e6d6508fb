"""Responses in JSON."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.responses import Response

__all__ = ["json_response"]


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response in JSON."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
