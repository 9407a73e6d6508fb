"""How a process of ours learns that it should end: first in good order, and if it is told again, at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, Self

__all__ = ["ShutdownSignal"]


class ShutdownSignal:
    """SIGTERM and SIGINT, counted."""

    def __init__(self) -> None:
        self._requested = asyncio.Event()
        self._forced = asyncio.Event()

    @classmethod
    def listening(cls) -> Self:
        """Of this process, from now on."""
        stopping = cls()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopping.ask)
        return stopping

    def ask(self) -> None:
        """Ask it to end; the second time, to do so at once."""
        (self._forced if self._requested.is_set() else self._requested).set()

    @property
    def is_requested(self) -> bool:
        """Whether it should end."""
        return self._requested.is_set()

    async def wait(self, *tasks: asyncio.Task[None]) -> bool:
        """Wait until it should end, or for the first of the tasks to end by itself; whether it was asked."""
        await _first(self._requested.wait(), *tasks)
        return self.is_requested

    async def unless_forced(self, work: Coroutine[Any, Any, object]) -> None:
        """Do what belongs to ending in good order, as long as nobody asks a second time."""
        working = asyncio.ensure_future(work)
        try:
            await _first(self._forced.wait(), working)
            if working.done():
                working.result()
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)


async def _first(signalled: Coroutine[Any, Any, Any], *tasks: asyncio.Future[Any]) -> None:
    waiting = asyncio.ensure_future(signalled)
    try:
        await asyncio.wait({waiting, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
