"""The bodies of requests at a worker's admin address."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from starlette.requests import Request

from semel.errors import InvalidRequest, MediaTooLarge

__all__ = ["read_body"]


async def read_body(request: Request, max_bytes: int, idle_s: float, advice: str = "send less") -> bytearray:
    """Return the body, given up on as soon as it is over the limit, whatever its announced length.

    `advice` says in that case what to do. The body grows in place: joining the pieces of 1 GiB at the end would need
    it twice.
    """
    body = bytearray()
    async with aclosing(request.stream()) as chunks:
        try:
            while True:
                async with asyncio.timeout(idle_s):
                    chunk = await anext(chunks, None)
                if chunk is None:
                    return body
                if len(body) + len(chunk) > max_bytes:
                    raise MediaTooLarge(f"the body is over {max_bytes:,} bytes; {advice}")
                body += chunk
        except TimeoutError:
            raise InvalidRequest(f"nothing more of the body came for {idle_s:g} s") from None
