"""The end of a frontend: not ready, then without new requests, then without any."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from semel.errors import NotReady
from semel.shutdown import ShutdownSignal

if TYPE_CHECKING:
    from semel.frontend.service import FrontendState
    from semel.web.server import HttpServer

__all__ = ["drain", "leave"]

_REASON: Final = "the frontend is shutting down"
_CUT_OFF_S: Final = 1.0
"""The time for clients to read the error of a request that is cut off."""

logger = logging.getLogger(__name__)


async def leave(service: FrontendState, server: HttpServer, stopping: ShutdownSignal, delay_s: float) -> None:
    """Say that we are not ready, and take requests for a while: a balancer learns of it only when it asks again."""
    service.leave(_REASON)
    server.release()
    if delay_s:
        logger.info("the frontend is not ready any more, and takes requests for %g s (--drain-delay-s)", delay_s)
        await stopping.unless_forced(asyncio.sleep(delay_s))


async def drain(service: FrontendState, server: HttpServer, stopping: ShutdownSignal, within_s: float) -> None:
    """Answer what was taken, and refuse what comes; probes are answered all the while."""
    service.drain(_REASON)
    server.release()
    logger.info("the frontend ends when its %d requests have, within %g s", service.limiter.requests, within_s)
    await stopping.unless_forced(service.limiter.until_empty(within_s))
    if service.limiter.requests:
        logger.warning("%d requests are cut off: raise --drain-s to let them end", service.limiter.requests)
        service.limiter.cut_off(NotReady(f"{_REASON}, and cut this request off: send it again"))
        await service.limiter.until_empty(_CUT_OFF_S)
