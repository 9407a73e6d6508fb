"""A Redis or Valkey of a run, which keeps nothing on the disk: it can be killed, stopped, filled and emptied."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from semel.lab.bench.ports import free_port

__all__ = ["RedisStore", "find_redis", "running_redis"]

_PROGRAMS: Final = ("valkey-server", "redis-server")
_INSTALLED: Final = Path(sys.prefix) / "opt" / "redis"
_FULL: Final = ("CONFIG", "SET", "maxmemory", "1mb")
_ROOMY: Final = ("CONFIG", "SET", "maxmemory", "0")
_PATIENT_S: Final = 5.0
_END_S: Final = 10.0


def find_redis() -> str | None:
    """Return the path of a server's program, if there is one."""
    path = f"{os.environ.get('PATH', '')}{os.pathsep}{_INSTALLED}"
    return next((found for name in _PROGRAMS if (found := shutil.which(name, path=path))), None)


@dataclass(slots=True)
class RedisStore:
    """A server on this machine."""

    program: str
    home: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Its address, as `--embedding-store` takes it."""
        return f"redis://127.0.0.1:{self.port}"

    def begin(self) -> None:
        """Start it, empty."""
        command = [self.program, "--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--appendonly", "no"]
        with (self.home / "redis.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.home)  # noqa: S603

    def end(self, number: int = signal.SIGTERM) -> None:
        """End it."""
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(_END_S)

    async def kill(self, seconds: float) -> None:
        """Kill it, and start another one in its place after so long."""
        self.end(signal.SIGKILL)
        await asyncio.sleep(seconds)
        self.begin()

    async def stop(self, seconds: float) -> None:
        """Let it answer nothing for so long."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            self.process.send_signal(signal.SIGCONT)

    async def fill(self, seconds: float) -> None:
        """Let it refuse every write for so long."""
        await self._command(*_FULL)
        await asyncio.sleep(seconds)
        await self._command(*_ROOMY)

    async def empty(self) -> None:
        """Delete all that it has."""
        await self._command("FLUSHALL")

    async def _command(self, *words: str) -> None:
        """Send a command, if it is up."""
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(_PATIENT_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.write((" ".join(words) + "\r\n").encode())
                await reader.readuntil(b"\r\n")
                writer.close()


@contextmanager
def running_redis(home: Path) -> Iterator[RedisStore | None]:
    """A store until the end of the block, if this machine has a program for one."""
    if (program := find_redis()) is None:
        yield None
        return
    store = RedisStore(program, home)
    store.begin()
    try:
        yield store
    finally:
        store.end(signal.SIGKILL)
