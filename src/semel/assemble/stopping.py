"""How a process of ours learns that it should end."""

from __future__ import annotations

import asyncio
import signal

__all__ = ["until_stopped"]


async def until_stopped(*tasks: asyncio.Task[None]) -> None:
    """Wait for SIGTERM or SIGINT, or for the first of the tasks to end."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({stopping, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
