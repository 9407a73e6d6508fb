"""Supervision of the processes of `semel serve`: each is kept running, and ended at the end.

Each child leads a process group of its own, so that Ctrl-C reaches only the supervisor, which then ends the groups in
order; a child dies with the supervisor even if that is killed (the kernel sends it SIGTERM). A child that ends by
itself is started again, after a pause that doubles while it keeps failing. So is one that cannot be started again for
want of memory, processes or files; after so many tries in a row that it never runs, `keep` raises, which is for its
owner to see.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Final

from semel.errors import ServiceError

__all__ = ["Child", "end_at_once", "ending"]

_PR_SET_PDEATHSIG: Final = 1
_MIN_PAUSE_S: Final = 0.5
_MAX_PAUSE_S: Final = 30.0
_STABLE_S: Final = 60.0
_MAX_TRIES: Final = 10  # over three minutes
_GROUP_S: Final = 1.5
_TRACKER_S: Final = 1.0
_POLL_S: Final = 0.05

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Child:
    """A command that is kept running."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Its environment, besides ours."""

    output: int | None = None
    """A descriptor for what it prints; None lets it print to ours."""

    descriptors: Sequence[int] = ()
    """Those that it inherits besides."""

    on_exit: Callable[[int], bool] | None = None
    """Called with the exit code each time it ends by itself; tells whether it is to be started again."""

    process: asyncio.subprocess.Process | None = None
    starts: int = 0

    async def keep(self) -> None:
        """Run it for ever; cancel to stop, then `end` it. Raises if it cannot be started, or not any more.

        Returns when it has ended and is not to be started again.
        """
        pause_s = _MIN_PAUSE_S
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            await self._start_again()
            assert self.process is not None
            code = await self.process.wait()
            await self._end_group(_GROUP_S)
            if self.on_exit is not None and not self.on_exit(code):
                return
            pause_s = _MIN_PAUSE_S if loop.time() - began > _STABLE_S else min(2 * pause_s, _MAX_PAUSE_S)
            logger.warning("the %s %s; starting it again in %.1f s", self.name, ending(code), pause_s)
            await asyncio.sleep(pause_s)

    async def end(self, within_s: float) -> None:
        """Ask it to end, then end what is left of its group. Who is asked a second time ends at once."""
        if self.process is None:
            return
        if self.process.returncode is None:
            self.process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), within_s)
        await self._end_group(_GROUP_S)
        await self.process.wait()

    async def _start_again(self) -> None:
        """Start it. What ended it may keep it from starting for a while: the machine has no memory, or no process."""
        pause_s = _MIN_PAUSE_S
        for tries in count(1):
            try:
                await self._start()
            except (OSError, subprocess.SubprocessError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                if not self.starts or tries == _MAX_TRIES:
                    again = f" again, after {tries} tries" if self.starts else ""
                    raise ServiceError(f"the {self.name} cannot be started{again}: {reason}") from error
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
                logger.warning("the %s cannot be started (%s); next try in %.1f s", self.name, reason, pause_s)
                await asyncio.sleep(pause_s)
            else:
                return

    async def _start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *self.command,
            env=os.environ | self.environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=self.output,
            stderr=self.output,
            pass_fds=self.descriptors,
            process_group=0,  # a session of its own would be a scheduling group of its own, and those starve each other
            preexec_fn=_die_with_parent,
        )
        self.starts += 1

    async def _end_group(self, within_s: float) -> None:
        """End what a child leaves behind: the engine's own processes are in its group.

        They are asked first and killed then, but for Python's resource trackers: they end by themselves when nobody is
        left, and remove the shared memory of those that were killed.
        """
        if not self._signal_group(signal.SIGTERM) or await self._group_gone(within_s):
            return
        assert self.process is not None
        for member in _members(self.process.pid):
            if not _is_tracker(member):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)
        if not await self._group_gone(_TRACKER_S):
            self._signal_group(signal.SIGKILL)

    async def _group_gone(self, within_s: float) -> bool:
        deadline = asyncio.get_running_loop().time() + within_s
        while self._signal_group(0):
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(_POLL_S)
        return True

    def _signal_group(self, number: int) -> bool:
        """Send a signal; returns whether there was anybody to send it to."""
        assert self.process is not None
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return False
        return True


def ending(code: int) -> str:
    """Put the exit code of a process in words; a negative one is the signal that ended it."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed ({name}; out of memory?)" if code == -signal.SIGKILL else f"was killed ({name})"


def _members(group: int) -> Iterator[int]:
    """List the processes of a group; none if the machine has no file left to look with."""
    try:
        entries = list(Path("/proc").iterdir())
    except OSError:
        return
    for entry in entries:
        with contextlib.suppress(OSError, ValueError, IndexError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[2]) == group:
                yield int(entry.name)


def _is_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


async def end_at_once(children: Sequence[Child], within_s: float) -> None:
    """End all children at the same time."""
    await asyncio.gather(*(child.end(within_s) for child in children))


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
