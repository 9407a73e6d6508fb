"""One process of the pool as the pool sees it: a child, our end of its pipe, and what it works on."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol, Self

from semel.aio import to_the_end
from semel.errors import ProtocolError, ServiceError
from semel.processing.pool.command import log_words, start
from semel.processing.pool.fork_server import ForkServer
from semel.processing.pool.pipe import (
    HEADER_BYTES,
    MAX_ANSWER_BYTES,
    MAX_MESSAGE_BYTES,
    Answer,
    Description,
    Failed,
    Load,
    Ready,
    decode_answer,
    encode,
    read_header,
    to_error,
)
from semel.processing.pool.staging import Staging
from semel.processing.sandbox import Sandbox

__all__ = ["END_TIMEOUT_S", "Handle", "PoolProcess"]

END_TIMEOUT_S: Final = 5.0
"""How long a process may take to end by itself."""

_MODULE: Final = "semel.processing.pool.child"
_BACKGROUND_MODULE: Final = "semel.processing.pool.preloaded_child"

_CPU_CLOCK: Final = 2
"""Of a process, as its number and this name it to `clock_gettime`: all of its threads, as they are scheduled."""

_START_TIMEOUT_S: Final = 120.0
_BACKGROUND_START_TIMEOUT_S: Final = 600.0


class Handle(Protocol):
    """A process, however it was started: `asyncio.subprocess.Process` has it too."""

    @property
    def pid(self) -> int:
        """Its number."""

    @property
    def returncode(self) -> int | None:
        """Its exit status, once that is known; negative for a signal."""

    async def wait(self) -> int:
        """Wait until it has ended; its exit status."""

    def kill(self) -> None:
        """End it at once."""


class PoolProcess:
    """A child that has loaded its processor. Made by `spawn`, given back by `end` and then `release`."""

    def __init__(
        self, process: Handle, pipe: socket.socket, max_payload_bytes: int, staging: Staging | None = None
    ) -> None:
        self.work: asyncio.Task[object] | None = None
        """What it works on or last worked on."""
        self.sandbox = Sandbox()
        """What is around it, once it is loaded."""
        self.staging = staging
        """Where it writes what it has made; None if it sends it."""
        self.on_replaced: Callable[[], None] = lambda: None
        """Called once it has ended and another one is there."""
        self._process = process
        self._pipe = pipe
        self._max_payload_bytes = max_payload_bytes
        self._start_timeout_s = _START_TIMEOUT_S

    @classmethod
    async def spawn(
        cls,
        max_payload_bytes: int,
        *,
        fork_server: ForkServer | None = None,
        stages: bool = False,
        in_background: bool = False,
        probes: bool = False,
    ) -> Self:
        """Start a process, which does nothing until it gets `Load`. `stages`: whether it has staging memory.

        The fork server forks it, if there is one that can. In the background its libraries are imported and the
        `probes`, if it is to have them, are decoded meanwhile, and the processors are left to those who work.
        """
        staging: Staging | None = None
        ours: socket.socket | None = None
        try:
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            with theirs:
                staging = Staging.create() if stages else None
                descriptors = (theirs.fileno(),) if staging is None else (theirs.fileno(), staging.fileno())
                words = (*log_words(), *(("probes",) if probes else ()))
                process = await _start(fork_server, descriptors, words, in_background=in_background)
        except BaseException as error:
            if ours is not None:
                ours.close()
            if staging is not None:
                staging.close()
            if isinstance(error, OSError):
                raise ServiceError(f"a preprocessing process cannot be started: {error.strerror}") from error
            raise
        child = cls(process, ours, max_payload_bytes, staging)
        child._start_timeout_s = _BACKGROUND_START_TIMEOUT_S if in_background else _START_TIMEOUT_S
        return child

    async def load(self, load: Load) -> Description:
        """Let it load its processor; one that cannot is ended."""
        try:
            return await self._load(load, self._start_timeout_s)
        except BaseException:
            await to_the_end(self._let_go())  # also if the others of its pool fail meanwhile
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def cpu_s(self) -> float:
        """The CPU time that it has used, 0 if it has ended."""
        try:
            return time.clock_gettime((~self.pid << 3) | _CPU_CLOCK)
        except OSError:
            return 0.0

    @property
    def running(self) -> bool:
        """Return whether it has not ended, as far as we have seen."""
        return self._process.returncode is None

    @property
    def free(self) -> bool:
        """Return whether it can take on an item."""
        return self.running and (self.work is None or self.work.done())

    @property
    def quiet(self) -> bool:
        """Return whether its pipe is open and empty, as it is between an answer and the next order."""
        try:
            self._pipe.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    async def ask(
        self,
        order: bytes,
        payload: bytes = b"",
        *,
        max_payload_bytes: int = 0,
        max_message_bytes: int = MAX_ANSWER_BYTES,
    ) -> tuple[Answer, memoryview]:
        """Send an order and read its answer. A caller that stops half-way has to end the process.

        An answer with a larger message or payload is a breach of the protocol, and nothing of it is read.
        """
        limit = min(max_payload_bytes, self._max_payload_bytes)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._pipe, order)
        await loop.sock_sendall(self._pipe, payload)
        header = await self._read(HEADER_BYTES)
        message_bytes, payload_bytes = read_header(header, max_payload_bytes=limit, max_message_bytes=max_message_bytes)
        answer = decode_answer(await self._read(message_bytes), payload_bytes=payload_bytes)
        return answer, await self._read(payload_bytes)

    async def wait(self) -> int:
        """Wait until it has ended; its exit status."""
        return await self._process.wait()

    async def end(self, *, within_s: float) -> bool:
        """Close its pipe, upon which it ends by itself, and kill it if it has not by then: True if that was needed."""
        with contextlib.suppress(OSError):
            self._pipe.shutdown(socket.SHUT_RDWR)
        try:
            async with asyncio.timeout(within_s):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            return True
        return False

    async def release(self) -> None:
        """Give back what we hold of a process that has ended."""
        try:
            if self.work is not None:
                await asyncio.wait({self.work})  # it may still read what the process had sent
        finally:
            self._pipe.close()
            if self.staging is not None:
                self.staging.close()

    async def _let_go(self) -> None:
        await self.end(within_s=0)
        await self.release()

    async def _load(self, load: Load, within_s: float) -> Description:
        try:
            async with asyncio.timeout(within_s):
                answer, _ = await self.ask(encode(load), max_message_bytes=MAX_MESSAGE_BYTES)
        except TimeoutError:
            raise ServiceError(f"a preprocessing process was not ready after {within_s:g} s") from None
        except (EOFError, OSError):
            raise ServiceError("a preprocessing process ended before it was ready; its log says why") from None
        if isinstance(answer, Failed):
            raise to_error(answer)
        if not isinstance(answer, Ready):
            raise ProtocolError(f"a preprocessing process began with {type(answer).__name__}")
        self.sandbox = answer.sandbox
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


async def _start(
    fork_server: ForkServer | None, descriptors: Sequence[int], words: Sequence[str], *, in_background: bool
) -> Handle:
    if fork_server is not None:
        forked = await fork_server.fork(descriptors, words, in_background=in_background)
        if forked is not None:
            return forked
    return await start(_BACKGROUND_MODULE if in_background else _MODULE, descriptors, words)
