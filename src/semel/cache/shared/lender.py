"""The frontend's end of leases: which ranges of its segment a local worker reads, and until when.

A lease ends when the worker returns it, or when the worker's end of the connection closes: its process is then gone or
has no view left. A lease does not end with a request, nor with any other session between the two processes: the
engine's transport may still be reading. Therefore closing the frontend's end only announces that it lends nothing more.
Open leases stay open until the worker returns them.
"""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Final, Self

from semel.cache.shared.cache import SharedCache
from semel.cache.shared.channel import ACCEPTED, MAX_LEASES, Channel, encode_hello, is_same_user
from semel.cache.shared.segment import Lease
from semel.core import Digest
from semel.errors import ProtocolError

__all__ = ["Lender"]

_CONNECT_TIMEOUT_S: Final = 2.0
_RETRY_S: Final = 0.01


class Lender:
    """One connection to one worker, with leases on the ranges of one cache."""

    def __init__(self, sock: socket.socket, cache: SharedCache) -> None:
        self._cache = cache
        self._out: set[int] = set()
        self.closed = False
        """True if lending has ended."""
        self._ended = asyncio.Event()
        self._channel = Channel(sock, on_ids=self._returned, on_end=self._end)

    @classmethod
    async def connect(cls, path: Path, cache: SharedCache, *, timeout_s: float = _CONNECT_TIMEOUT_S) -> Self:
        """Introduce the cache's segment to the worker at `path`.

        Raises `OSError` if no worker listens or answers in time, `ProtocolError` if the worker refuses.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        try:
            async with asyncio.timeout(timeout_s):
                await _connect(sock, path)
                _introduce(sock, cache)
                await _accepted(sock)
        except BaseException:
            sock.close()
            raise
        return cls(sock, cache)

    @property
    def leases(self) -> int:
        """Number of open leases of this connection."""
        return len(self._out)

    def __repr__(self) -> str:
        return f"Lender({self.leases} leases{', closed' if self.closed else ''})"

    def lend(self, digest: Digest) -> Lease | None:
        """Lend a feature to the worker; None if it is not cached, or no more leases are possible."""
        if self.closed or len(self._out) >= MAX_LEASES:
            return None
        lease = self._cache.lease(digest)
        if lease is not None:
            self._out.add(lease.id)
        return lease

    def close(self) -> None:
        """Stop lending; the connection ends with the last lease."""
        if self.closed:
            return
        self.closed = True
        if self._out:
            self._channel.finish()
        else:
            self._end()

    async def wait_closed(self) -> None:
        """Wait until the connection has ended and every lease is returned."""
        await self._ended.wait()

    def _returned(self, ids: tuple[int, ...]) -> None:
        for lease_id in ids:
            if lease_id in self._out:  # the worker may name leases that it does not have
                self._out.discard(lease_id)
                self._cache.give_back(lease_id)
        if self.closed and not self._out:
            self._end()

    def _end(self) -> None:
        if self._ended.is_set():
            return
        self.closed = True
        self._ended.set()
        self._channel.close()
        for lease_id in self._out:
            self._cache.give_back(lease_id)
        self._out.clear()


async def _connect(sock: socket.socket, path: Path) -> None:
    while True:
        try:
            sock.connect(str(path))
        except BlockingIOError:  # the listener's queue is full
            await asyncio.sleep(_RETRY_S)
        else:
            break
    if not is_same_user(sock):
        raise ProtocolError(f"{path} belongs to another user's process: nothing is shared with it")


async def _accepted(sock: socket.socket) -> None:
    if await asyncio.get_running_loop().sock_recv(sock, len(ACCEPTED)) != ACCEPTED:
        raise ProtocolError("the worker refused the shared memory; its log says why")


def _introduce(sock: socket.socket, cache: SharedCache) -> None:
    fd = cache.segment.open_to_read()
    try:
        socket.send_fds(sock, [encode_hello(cache.segment.id, cache.segment.size)], [fd])
    finally:
        os.close(fd)
