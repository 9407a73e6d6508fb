"""Shutdown by signals: in good order at the first, at once at the second."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Self

__all__ = ["ShutdownSignal"]


class ShutdownSignal:
    """SIGTERM, SIGINT and SIGHUP, counted. A terminal that goes sends the last; `nohup` keeps it from us."""

    def __init__(self) -> None:
        self._requested = asyncio.Event()
        self._forced = asyncio.Event()

    @classmethod
    def listening(cls) -> Self:
        """Listen for the signals of this process, from now on."""
        stopping, loop = cls(), asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stopping.ask)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, stopping._hang_up)
        return stopping

    def ask(self) -> None:
        """Ask it to end; the second time, to do so at once."""
        (self._forced if self._requested.is_set() else self._requested).set()

    def _hang_up(self) -> None:
        _leave_terminal()
        self.ask()

    @property
    def is_requested(self) -> bool:
        """Return whether it should end."""
        return self._requested.is_set()

    async def wait(self, *tasks: asyncio.Task[Any]) -> bool:
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


def _leave_terminal() -> None:
    """Print to nobody if the terminal is gone: what cannot be printed must not keep a process from ending well."""
    for stream in (sys.stdout, sys.stderr):
        try:
            os.write(stream.fileno(), b"")
        except OSError:
            with Path(os.devnull).open("wb") as nobody:
                os.dup2(nobody.fileno(), stream.fileno())


async def _first(signalled: Coroutine[Any, Any, Any], *tasks: asyncio.Future[Any]) -> None:
    waiting = asyncio.ensure_future(signalled)
    try:
        await asyncio.wait({waiting, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
