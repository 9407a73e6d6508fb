"""A pool as shipped whose processes are scripts of a test: what each answers, byte for byte, is the script's to say."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from itertools import count

from semel.cache import SharedCache, Window
from semel.core import Layout, Target
from semel.media import DecodeLimits
from semel.processing.pool.job import OfferLimits
from semel.processing.pool.pipe import (
    HEADER_BYTES,
    Answer,
    Description,
    Load,
    Order,
    decode_order,
    encode,
    read_header,
)
from semel.processing.pool.pool import Pool
from semel.processing.pool.process import PoolProcess
from semel.processing.pool.processes import ProcessSet
from semel.processing.pool.staging import Staging
from semel.wire.layout_runs import to_runs

MAX_MEMORY_BYTES = 1 << 30
ONE_TOKEN = to_runs(Layout((7,)))

_pids = count(1_000_000)


class Peer:
    """The process's end of the pipe, and its staging memory if it has some."""

    def __init__(self, pipe: socket.socket, memory: Window | None) -> None:
        self.memory = memory
        self.sent_bytes = 0
        """What the pool has taken of the payloads, or the kernel for it."""
        self._pipe = pipe

    async def receive(self) -> tuple[Order, bytes]:
        message_bytes, payload_bytes = read_header(await self._read(HEADER_BYTES), max_payload_bytes=MAX_MEMORY_BYTES)
        return decode_order(await self._read(message_bytes)), await self._read(payload_bytes)

    async def send(self, answer: Answer, payload_bytes: int = 0) -> None:
        """An answer, and so many bytes of payload behind it."""
        await asyncio.get_running_loop().sock_sendall(self._pipe, encode(answer, payload_bytes))
        await self.send_bytes(bytes(payload_bytes))

    async def send_bytes(self, data: bytes) -> None:
        """Bytes as they are, counted as far as they are taken."""
        for start in range(0, len(data), 64 << 10):
            await asyncio.get_running_loop().sock_sendall(self._pipe, chunk := data[start : start + (64 << 10)])
            self.sent_bytes += len(chunk)

    async def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            if not (more := await asyncio.get_running_loop().sock_recv(self._pipe, size - len(data))):
                raise EOFError
            data += more
        return data


Script = Callable[[Peer], Awaitable[None]]


class _Handle:
    """What a pool knows of a process, of a script."""

    def __init__(self, script: Script, peer: Peer, pipe: socket.socket) -> None:
        self.pid = next(_pids)
        self.returncode: int | None = None
        self._task = asyncio.create_task(self._run(script, peer, pipe))

    async def wait(self) -> int:
        await asyncio.wait({self._task})
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        self._task.cancel()

    async def _run(self, script: Script, peer: Peer, pipe: socket.socket) -> None:
        try:
            with pipe, suppress(EOFError, ConnectionError):
                await script(peer)
        finally:
            self.returncode = 0


@asynccontextmanager
async def scripted_pool(
    *scripts: Script, memory: SharedCache | None = None, offers: OfferLimits | None = None, timeout_s: float = 20.0
) -> AsyncIterator[Pool]:
    """A pool with a process for each script; one that ends is not replaced."""
    load = Load("model", Target("float32"), DecodeLimits(), timeout_s, MAX_MEMORY_BYTES)
    processes = ProcessSet(load, len(scripts), stages=memory is not None)
    processes._description = Description("scripted", {}, encoder_decoder=False)
    for script in scripts:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        staging = None if memory is None else Staging.create()
        window = None if staging is None else Window.attach(staging.fileno(), writable=True)
        handle = _Handle(script, Peer(theirs, window), theirs)
        processes.children.append(PoolProcess(handle, ours, MAX_MEMORY_BYTES, staging))
    pool = Pool(processes, 1_024, memory, offers)
    try:
        yield pool
    finally:
        await pool.close()
