"""One process of the pool as the pool sees it: a child, our end of its pipe, and what it works on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from typing import Final, Self

from semel.errors import ProtocolError, ServiceError
from semel.processing.pool.pipe import (
    HEADER_BYTES,
    Answer,
    Description,
    Failed,
    Load,
    Ready,
    decode_answer,
    encode,
    error_of,
    read_header,
)
from semel.telemetry.logs import is_json

__all__ = ["END_TIMEOUT_S", "PoolProcess"]

END_TIMEOUT_S: Final = 5.0
"""How long a process may take to end by itself."""

_COMMAND: Final = (sys.executable, "-P", "-m")
_MODULE: Final = "semel.processing.pool.child"
_BACKGROUND_MODULE: Final = "semel.processing.pool.preloaded_child"
_ENVIRONMENT: Final = {
    "CUDA_VISIBLE_DEVICES": "",  # a request's options can name a device; there is none but the CPU
    # Buffers of images stay with the process instead of going back to the kernel after each: that was 600 page faults,
    # 1.5 ms of 20 for an image of 1024×1024.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(128 << 20),
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_CREDENTIALS: Final = ("AWS_", "AZURE_", "GOOGLE_")
"""Beginnings of variables that are of a media store in a bucket. A decoder that is taken over must not have them."""

_START_TIMEOUT_S: Final = 120.0
_BACKGROUND_START_TIMEOUT_S: Final = 600.0


class PoolProcess:
    """A child that has loaded its processor. Made by `spawn`, given back by `end` and then `release`."""

    def __init__(self, process: Process, pipe: socket.socket, max_payload_bytes: int) -> None:
        self.work: asyncio.Task[None] | None = None
        """What it works on or last worked on."""
        self._process = process
        self._pipe = pipe
        self._max_payload_bytes = max_payload_bytes
        self._start_timeout_s = _START_TIMEOUT_S

    @classmethod
    async def spawn(
        cls, max_payload_bytes: int, memory: int | None = None, *, in_background: bool = False, probes: bool = False
    ) -> Self:
        """Start a process, which does nothing until it is told what to load. `memory` is of what it shares.

        In the background it imports its libraries meanwhile, decodes the `probes` if it is to have them, and leaves the
        processors to those who work.
        """
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise ServiceError(f"a preprocessing process cannot be started: {error.strerror}") from error
        ours.setblocking(False)
        with theirs:
            descriptors = (theirs.fileno(),) if memory is None else (theirs.fileno(), memory)
            try:
                process = await asyncio.create_subprocess_exec(
                    *_COMMAND,
                    _BACKGROUND_MODULE if in_background else _MODULE,
                    *map(str, descriptors),
                    *(("json",) if is_json() else ()),
                    *(("probes",) if probes else ()),
                    stdin=DEVNULL,
                    stdout=DEVNULL,
                    env=_environment(),
                    pass_fds=descriptors,
                    preexec_fn=os.setpgrp,  # Ctrl-C is for the pool, which ends its processes in order
                )
            except OSError as error:
                ours.close()
                raise ServiceError(f"a preprocessing process cannot be started: {error.strerror}") from error
        child = cls(process, ours, max_payload_bytes)
        child._start_timeout_s = _BACKGROUND_START_TIMEOUT_S if in_background else _START_TIMEOUT_S
        return child

    async def load(self, load: Load) -> Description:
        """Let it load its processor; one that cannot is ended."""
        try:
            return await self._load(load, self._start_timeout_s)
        except BaseException:
            await self.end(within_s=0)
            await self.release()
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended, as far as we have seen."""
        return self._process.returncode is None

    @property
    def free(self) -> bool:
        """Whether it can take on an item."""
        return self.running and (self.work is None or self.work.done())

    @property
    def quiet(self) -> bool:
        """Whether its pipe is open and empty, as it is between an answer and the next order."""
        try:
            self._pipe.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    async def ask(self, order: bytes, payload: bytes = b"") -> tuple[Answer, memoryview]:
        """Send an order and read its answer. Whoever stops half-way has to end the process."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._pipe, order)
        await loop.sock_sendall(self._pipe, payload)
        header = await self._read(HEADER_BYTES)
        message_bytes, payload_bytes = read_header(header, max_payload_bytes=self._max_payload_bytes)
        answer = decode_answer(await self._read(message_bytes), payload_bytes=payload_bytes)
        return answer, await self._read(payload_bytes)

    async def wait(self) -> int:
        """Wait until it has ended; its exit status."""
        return await self._process.wait()

    async def end(self, *, within_s: float) -> None:
        """Close its pipe, upon which it ends by itself, and kill it if it has not by then."""
        with contextlib.suppress(OSError):
            self._pipe.shutdown(socket.SHUT_RDWR)
        try:
            async with asyncio.timeout(within_s):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def release(self) -> None:
        """Give back what we hold of a process that has ended."""
        if self.work is not None:
            await asyncio.wait({self.work})  # it may still read what the process had sent
        self._pipe.close()

    async def _load(self, load: Load, within_s: float) -> Description:
        try:
            async with asyncio.timeout(within_s):
                answer, _ = await self.ask(encode(load))
        except TimeoutError:
            raise ServiceError(f"a preprocessing process was not ready after {within_s:g} s") from None
        except (EOFError, OSError):
            raise ServiceError("a preprocessing process ended before it was ready; its log says why") from None
        if isinstance(answer, Failed):
            raise error_of(answer)
        if not isinstance(answer, Ready):
            raise ProtocolError(f"a preprocessing process began with {type(answer).__name__}")
        return answer.description

    async def _read(self, size: int) -> memoryview:
        loop = asyncio.get_running_loop()
        buffer = memoryview(bytearray(size))
        rest = buffer
        while rest:
            if not (count := await loop.sock_recv_into(self._pipe, rest)):
                raise EOFError
            rest = rest[count:]
        return buffer


def _environment() -> dict[str, str]:
    """What a child sees of ours (threats S23)."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(_CREDENTIALS)}
    return ours | _ENVIRONMENT
