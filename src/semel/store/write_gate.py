"""A gate for writes: many at a time, or one alone, for which a full disk is cleared. It belongs to one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from semel.errors import MediaStoreUnavailable

__all__ = ["WriteGate"]

_WAIT_S: Final = 60.0


class WriteGate:
    """A gate for writes, in the order in which they come."""

    def __init__(self, wait_s: float = _WAIT_S) -> None:
        self._wait_s = wait_s
        self._turn = asyncio.Lock()
        self._writing = 0
        self._idle = asyncio.Event()

    @asynccontextmanager
    async def together(self) -> AsyncIterator[None]:
        """Write next to others, once nobody is alone."""
        await self._take_turn()
        self._turn.release()
        self._writing += 1
        try:
            yield
        finally:
            self._writing -= 1
            if not self._writing:
                self._idle.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Write when the others have ended, while no other begins."""
        await self._take_turn()
        try:
            while self._writing:  # each has a timeout of its own
                self._idle.clear()
                await self._idle.wait()
            yield
        finally:
            self._turn.release()

    async def _take_turn(self) -> None:
        try:
            async with asyncio.timeout(self._wait_s):
                await self._turn.acquire()
        except TimeoutError:
            raise MediaStoreUnavailable("the disk of the media store is being cleared; try again in a moment") from None
