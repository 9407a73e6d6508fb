"""One exchange over HTTP: a body is read and parsed, JSON or an error goes back, and a client may leave meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from contextlib import aclosing
from typing import Any, Final, TypeVar

import msgspec
from fastapi import Request, Response
from pydantic import TypeAdapter, ValidationError

from semel.errors import InvalidRequest, MediaTooLarge, RequestError, SemelError, ServiceError
from semel.frontend.answers import error_body

__all__ = ["as_error", "as_json", "parse", "read", "unless_disconnected"]

_CLIENT_CLOSED: Final = 499
"""The status that nobody reads, by the convention of nginx: the client had gone."""

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


async def read(request: Request, max_bytes: int) -> bytes:
    """The body, given up on as soon as it is over the limit, whatever its announced length."""
    parts: list[bytes] = []
    size = 0
    async with aclosing(request.stream()) as chunks:
        async for chunk in chunks:
            size += len(chunk)
            if size > max_bytes:
                raise MediaTooLarge(f"the request is over {max_bytes:,} bytes; raise it with --max-body-bytes")
            parts.append(chunk)
    return b"".join(parts)


def parse(body: bytes, kind: TypeAdapter[_T]) -> _T:
    """The body as a request of this kind; the error names the field."""
    try:
        return kind.validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise InvalidRequest(f"{where}: {first['msg']}") from None


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The response that `work` makes; it is cancelled as soon as the client has gone."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        logger.info("a client went away before its answer")
        return Response(status_code=_CLIENT_CLOSED)
    finally:
        watching.cancel()
        working.cancel()
        await asyncio.wait({working})


def as_json(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response in JSON."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def as_error(error: SemelError) -> Response:
    """What a client is told of an error: only what is meant for it."""
    if not isinstance(error, (RequestError, ServiceError)):
        logger.error("an internal error reached a client: %r", error)
        hidden = error_body("internal error; the frontend's log says more", code="internal_error", status=500)
        return as_json(hidden, 500)
    headers = {"Retry-After": "1"} if error.status == 503 else None
    return as_json(error_body(str(error), code=error.code, status=error.status), error.status, headers)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
