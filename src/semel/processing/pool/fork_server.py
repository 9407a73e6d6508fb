"""The pool's side of `fork_server_child`: starts it, orders forks of it, and learns how they end.

Pool processes live on when their fork server dies: they have a pipe of their own to the pool. The next one that is
needed comes from another fork server. Where none can fork, as with an allocator that starts threads, each process is
started as a program instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
from asyncio.subprocess import Process
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from semel.errors import ServiceError
from semel.processing.pool.command import CANNOT_FORK, log_words, start

__all__ = ["LOST_STATUS", "ForkServer", "ForkedProcess"]

LOST_STATUS: Final = 255
"""The exit status of a process whose fork server died before it and could not tell; asyncio says the same."""

_MODULE: Final = "semel.processing.pool.fork_server_child"
_PROGRAM: Final = "semel.processing.pool.preloaded_child"
_START_TIMEOUT_S: Final = 600.0
_END_TIMEOUT_S: Final = 5.0
_MAX_CRASHES: Final = 8
"""Forks have the addresses of their fork server. An attacker that guesses them, crash by crash, has so many tries."""

_MESSAGE_BYTES: Final = 32

logger = logging.getLogger(__name__)


class ForkedProcess:
    """A process that a fork server has forked: what `asyncio.subprocess.Process` is of one that we started."""

    def __init__(self, pid: int, descriptor: int, status: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._descriptor = descriptor
        self._status = status
        self._ending = asyncio.create_task(self._end())

    @classmethod
    async def of(cls, status: socket.socket) -> Self | None:
        """Return the process that reports on this socket; None if there is none."""
        await _readable(status.fileno())
        data, descriptors, *_ = socket.recv_fds(status, _MESSAGE_BYTES, 1)
        if not data:
            return None
        if (number := int(data)) < 0 or not descriptors:
            # A number without its descriptor: we may have no more of them, and the kernel drops it. The process ends
            # with the pipe that its caller closes.
            reason = os.strerror(-number if number < 0 else errno.EMFILE)
            raise ServiceError(f"a preprocessing process cannot be forked: {reason}")
        return cls(number, descriptors[0], status)

    def kill(self) -> None:
        """End it at once."""
        if self.returncode is None:
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    async def wait(self) -> int:
        """Wait until it has ended; its exit status, negative for a signal."""
        return await asyncio.shield(self._ending)

    async def _end(self) -> int:
        try:
            await _readable(self._descriptor)
            try:
                async with asyncio.timeout(_END_TIMEOUT_S):
                    await _readable(self._status.fileno())
                    self.returncode = int(self._status.recv(_MESSAGE_BYTES))
            except (OSError, ValueError):  # the fork server has died, or does not say
                self.returncode = LOST_STATUS
            return self.returncode
        finally:
            self._status.close()
            os.close(self._descriptor)


class ForkServer:
    """The source of a pool's processes. It is started for the first of them, and again if it has died."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder  # of the model whose processor they will load
        self._process: Process | None = None
        self._orders: socket.socket | None = None
        self._ending: list[Process] = []
        self._turn = asyncio.Lock()  # one order at a time: the queue of such a socket is short
        self._crashes = 0
        self._can_fork = True

    @property
    def pid(self) -> int | None:
        """The number of its process, if there is one."""
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    async def fork(
        self, descriptors: Sequence[int], words: Sequence[str], *, in_background: bool = False
    ) -> ForkedProcess | None:
        """A process with these descriptors, and with these words for arguments; None if it has to be started instead.

        The fork server imports its libraries first, if it has not; in the background it leaves the cores to others.
        """
        async with self._turn:
            if not self._can_fork:
                return None
            try:
                async with asyncio.timeout(_START_TIMEOUT_S):
                    forked = await self._fork(descriptors, words, in_background=in_background)
            except TimeoutError:
                await self._drop()
                raise ServiceError(f"a preprocessing process was not forked within {_START_TIMEOUT_S:g} s") from None
            if forked is None and (status := await self._drop()) != CANNOT_FORK:
                # Not tried again with the same pipe: it may have forked before it died.
                raise ServiceError(f"the fork server of preprocessing processes died with status {status}")
            self._can_fork = forked is not None
            return forked

    def count_crash(self) -> None:
        """Count a crash of a forked process: after some, the next ones come from another fork server."""
        self._crashes += 1
        if self._crashes >= _MAX_CRASHES:
            self._retire()

    async def close(self) -> None:
        """End it, once its processes have ended. Closing twice does no harm."""
        self._retire()
        for process in self._ending:
            await _end(process)
        self._ending.clear()

    async def _fork(
        self, descriptors: Sequence[int], words: Sequence[str], *, in_background: bool
    ) -> ForkedProcess | None:
        """Order a process; None if the fork server ends instead."""
        try:
            status = _send_order(await self._running(in_background=in_background), descriptors, words)
        except ConnectionError:  # it died before
            logger.warning("the fork server of preprocessing processes has died; starting another")
            await self._drop()
            status = _send_order(await self._running(in_background=in_background), descriptors, words)
        try:
            forked = await ForkedProcess.of(status)
        except BaseException:
            status.close()
            raise
        if forked is None:
            status.close()
        return forked

    async def _running(self, *, in_background: bool) -> socket.socket:
        """Return where to send an order; starts the fork server if there is none."""
        if self._orders is not None and self.pid is not None:
            return self._orders
        self._retire()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        folder = () if self._folder is None else (str(self._folder.resolve()),)
        with theirs:
            try:
                words = (_PROGRAM, *folder, *(("background",) if in_background else ()), *log_words())
                self._process = await start(_MODULE, [theirs.fileno()], words)
            except BaseException:
                ours.close()
                raise
        ours.setblocking(False)
        self._orders = ours
        return ours

    async def _drop(self) -> int | None:
        """Have done with one that does not do its part; its exit status."""
        process = self._process
        self._retire()
        return None if process is None else await _end(process)

    def _retire(self) -> None:
        """Order nothing of it any more: it ends with the last of its processes."""
        self._crashes = 0
        if self._orders is not None:
            self._orders.close()
        if self._process is not None:
            self._ending = [one for one in (*self._ending, self._process) if one.returncode is None]
        self._orders = self._process = None


def _send_order(orders: socket.socket, descriptors: Sequence[int], words: Sequence[str]) -> socket.socket:
    """Return where the process will report that is ordered here."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with theirs:
        try:
            socket.send_fds(orders, [(" ".join(words) or " ").encode()], [theirs.fileno(), *descriptors])
        except BaseException:
            ours.close()
            raise
    return ours


async def _end(process: Process) -> int:
    """Wait for a process that has no reason to go on, and kill it if it does."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_END_TIMEOUT_S):
            return await process.wait()
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    return await process.wait()


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def on_ready() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(descriptor, on_ready)
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)
