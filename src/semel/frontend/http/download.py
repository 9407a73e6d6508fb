"""Responses that are large from the start. Their unsent bytes are charged to the request's account (threats S18, S28).

Bytes are released as they are sent. Until the last one is, the response can be called back when another tenant needs
its share of the budget: a download can be repeated. A client that does not read, or reads too slowly, is cut off:
otherwise a few such clients could hold the whole budget permanently.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Final

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from semel.errors import SemelError
from semel.frontend.budget import Account

__all__ = ["MIN_BYTES_PER_S", "Download", "in_memory"]

MIN_BYTES_PER_S: Final = 64 * 1024
"""The least pace of a client, after the first ten seconds."""

_GRACE_S: Final = 10.0
_CHUNK_BYTES: Final = 256 * 1024
"""The server copies what it cannot send at once, so it gets one small chunk at a time."""

logger = logging.getLogger(__name__)


class Download(StreamingResponse):
    """A response of so many bytes. The account has those that are in memory, and charges at most those not sent yet."""

    def __init__(
        self, pieces: AsyncIterator[memoryview], nbytes: int, account: Account, *, media_type: str, within_s: float
    ) -> None:
        account.keep(nbytes)
        account.commit()
        super().__init__(self._release(pieces), headers={"Content-Length": str(nbytes)}, media_type=media_type)
        self._nbytes = nbytes
        self._account = account
        self._within_s = within_s
        self._deadline = asyncio.timeout(None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the bytes. A response that is cut off stays incomplete, so that its connection is closed."""
        try:
            async with self._deadline:
                self._extend(asyncio.get_running_loop().time(), 0)
                with self._account.revocable():
                    await super().__call__(scope, receive, send)
        except TimeoutError:
            logger.info(
                "a client did not take its answer within %g s (--max-body-s) and at %d bytes/s; it is cut off",
                self._within_s,
                MIN_BYTES_PER_S,
            )
        except SemelError as error:
            logger.info("an answer was cut off: %s", error)
        finally:
            self._account.close()

    async def _release(self, pieces: AsyncIterator[memoryview]) -> AsyncIterator[memoryview]:
        began_s, sent = asyncio.get_running_loop().time(), 0
        try:
            async for piece in pieces:
                for start in range(0, len(piece), _CHUNK_BYTES):
                    yield (chunk := piece[start : start + _CHUNK_BYTES])
                    sent += len(chunk)
                    self._account.keep(self._nbytes - sent)
                    self._extend(began_s, sent)
        except SemelError as error:
            logger.info("an answer was cut off: %s", error)

    def _extend(self, began_s: float, sent: int) -> None:
        """Give the client time for the next chunk."""
        self._deadline.reschedule(began_s + min(self._within_s, _GRACE_S + sent / MIN_BYTES_PER_S))


async def in_memory(pieces: Sequence[bytes | memoryview]) -> AsyncIterator[memoryview]:
    """Pieces that are all there."""
    for piece in pieces:
        yield memoryview(piece)
