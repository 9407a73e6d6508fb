"""Waiting for what sets no event of ours: another process, or tasks in this event loop."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable


async def until(condition: Callable[[], bool], *, within_s: float = 30.0) -> None:
    """Wait until something is so, or fail."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process; kill it if it takes long."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(30)
