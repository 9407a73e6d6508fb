"""Responses that are large from the start. Their unsent bytes are charged to the request's account (threats S18).

A client that does not read holds its share of the budget, and no more. Its connection is closed after a time limit:
otherwise a few such clients could hold the whole budget permanently.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Final

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from semel.frontend.budget import Account

__all__ = ["Download"]

_CHUNK_BYTES: Final = 256 * 1024
"""The server copies what it cannot send at once, so it gets one small chunk at a time."""

logger = logging.getLogger(__name__)


class Download(StreamingResponse):
    """A response whose bytes are complete. From now on the account charges only the bytes that are not sent yet."""

    def __init__(
        self, pieces: Sequence[bytes | memoryview], account: Account, *, media_type: str, within_s: float
    ) -> None:
        nbytes = sum(len(piece) for piece in pieces)
        account.keep(nbytes)
        account.commit()
        super().__init__(_chunks(pieces), headers={"Content-Length": str(nbytes)}, media_type=media_type)
        self._account = account
        self._within_s = within_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the bytes; close the connection of a client that does not read them in time."""
        try:
            async with asyncio.timeout(self._within_s):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            logger.info("a client did not take its answer within %g s (--max-body-s)", self._within_s)
        finally:
            self._account.close()


async def _chunks(pieces: Sequence[bytes | memoryview]) -> AsyncIterator[memoryview]:
    for piece in pieces:
        view = memoryview(piece)
        for start in range(0, len(view), _CHUNK_BYTES):
            yield view[start : start + _CHUNK_BYTES]
