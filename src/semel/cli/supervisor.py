"""Keeps the processes of `semel serve` alive, and ends every one of them.

Each child leads a process group of its own, so that Ctrl-C reaches only the supervisor, which then ends the groups in
order; a child dies with the supervisor even if that is killed (the kernel sends it SIGTERM). A child that ends by
itself is started again, after a pause that doubles while it keeps failing.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["Child", "end_all"]

_PR_SET_PDEATHSIG: Final = 1
_MIN_PAUSE_S: Final = 0.5
_MAX_PAUSE_S: Final = 30.0
_STABLE_S: Final = 60.0

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Child:
    """A command that is kept running."""

    name: str
    command: Sequence[str]
    output: int | None = None
    """A descriptor for what it prints; None lets it print to ours."""

    on_exit: Callable[[int], None] | None = None
    """Called with the exit code each time it ends by itself."""

    process: asyncio.subprocess.Process | None = None
    starts: int = 0

    async def keep(self) -> None:
        """Run it for ever; cancel to stop, then `end` it."""
        pause_s = _MIN_PAUSE_S
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            await self._start()
            assert self.process is not None
            code = await self.process.wait()
            self._kill_group()
            if self.on_exit is not None:
                self.on_exit(code)
            pause_s = _MIN_PAUSE_S if loop.time() - began > _STABLE_S else min(2 * pause_s, _MAX_PAUSE_S)
            logger.warning("the %s ended with code %d; starting it again in %.1f s", self.name, code, pause_s)
            await asyncio.sleep(pause_s)

    async def end(self, within_s: float) -> None:
        """Ask it to end, then kill what is left of its group."""
        if self.process is None or self.process.returncode is not None:
            return
        self.process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), within_s)
        self._kill_group()
        await self.process.wait()

    async def _start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *self.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=self.output,
            stderr=self.output,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        self.starts += 1

    def _kill_group(self) -> None:
        """What a child leaves behind ends with it: the engine's own processes are in its group."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


async def end_all(children: Sequence[Child], within_s: float) -> None:
    """End all children at once."""
    await asyncio.gather(*(child.end(within_s) for child in children))


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
