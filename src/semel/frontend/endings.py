"""How a stream of events begins and ends, whatever it tells: its name, and the error that ended it if one did."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from fastapi import Request

from semel.errors import RequestError, ServiceError
from semel.frontend.answers import error_body
from semel.frontend.events import DONE, event

__all__ = ["ended", "wished_id"]

_MAX_ID_CHARS: Final = 128


def wished_id(request: Request) -> str | None:
    """What the answer's id is to end with, by its header; inside, requests have ids of our own."""
    wished = request.headers.get("x-request-id")
    return wished if wished and len(wished) <= _MAX_ID_CHARS and wished.isprintable() else None


async def ended(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The events, then the error that ended them if one did, then the end."""
    try:
        async for one in events:
            yield one
    except (RequestError, ServiceError) as error:
        yield event(error_body(str(error), code=error.code, status=error.status))
    yield DONE
