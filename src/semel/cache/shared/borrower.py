"""The worker's end of leases: the segments of local frontends, each mapped once and read in place.

A borrowed view is returned when the last buffer over it is gone, in any thread. Returns are collected and sent in
batches. The worker's end of a connection stays open while one of its views is alive, even after the frontend is gone,
and even after this object is closed: a frontend takes the end of the connection as the end of all reads.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import get_ident
from typing import Final, Self

from semel.cache.shared.channel import ACCEPTED, HELLO_BYTES, MAX_LEASES, Channel, is_same_user, read_hello
from semel.cache.shared.segment import Lease, Window
from semel.errors import ConfigError, ProtocolError

__all__ = ["Borrower"]

_MAX_CONNECTIONS: Final = 1_024
_HELLO_TIMEOUT_S: Final = 2.0
_MAX_DESCRIPTORS: Final = 4  # one is correct; the kernel closes those that do not fit
_BACKOFF_S: Final = 1.0

logger = logging.getLogger(__name__)


class _Connection:
    """One frontend's segment, and the views borrowed from it."""

    def __init__(self, sock: socket.socket, window: Window, on_change: Callable[[_Connection], None]) -> None:
        self.ended = False
        self._window = window
        self._on_change: Callable[[_Connection], None] | None = on_change
        self._alive: set[int] = set()
        self._released: deque[int] = deque()
        self._scheduled = False
        self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        self._thread = get_ident()
        self._channel = Channel(sock, on_ids=self._ignore, on_end=self._end)

    @property
    def idle(self) -> bool:
        """True if no view is alive."""
        return not self._alive

    def borrow(self, lease: Lease) -> memoryview:
        if lease.id in self._alive:
            raise ProtocolError(f"lease {lease.id} is borrowed already")
        if len(self._alive) >= MAX_LEASES:
            raise ProtocolError(f"a frontend lends more than {MAX_LEASES:,} ranges at once")
        view = self._window.borrow(lease, self._note)
        self._alive.add(lease.id)
        return view

    def catch_up(self) -> None:
        """Process what the frontend has sent, including its end."""
        self._channel.read()

    def settle(self) -> None:
        """Return the leases of released views."""
        if self._loop is None:
            return
        self._scheduled = False
        released = [self._released.popleft() for _ in range(len(self._released))]
        self._alive.difference_update(released)
        self._channel.send(released)
        if self._on_change is not None:
            self._on_change(self)

    def close(self) -> None:
        """Close this end of the connection, or, while views are alive, let the last one close it."""
        self._on_change = self._loop = None
        if self.idle:
            self._channel.close()
        else:
            # Only the finalizers of the views refer to this connection now.
            weakref.finalize(self, os.close, self._channel.detach()).atexit = False

    def _note(self, lease_id: int) -> None:
        """Record that a view is gone. Runs in any thread, at any point."""
        self._released.append(lease_id)
        if self._scheduled or (loop := self._loop) is None:
            return
        self._scheduled = True
        with suppress(RuntimeError):  # the loop ended earlier: the process's end returns everything
            # A loop need not be woken from its own thread: a return then takes 0.1 ms less.
            call = loop.call_soon if get_ident() == self._thread else loop.call_soon_threadsafe
            call(self.settle)

    def _ignore(self, ids: tuple[int, ...]) -> None:
        """Ignore ids from a frontend: a lease comes with a request and ends in the worker."""
        logger.warning("ignored %d leases that a frontend told by the way of returns", len(ids))

    def _end(self) -> None:
        self.ended = True
        if self._on_change is not None:
            self._on_change(self)


class Borrower:
    """A listener for local frontends that borrows from them: `async with Borrower(path) as borrower`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lenders: dict[bytes, _Connection] = {}
        self._leaving: set[_Connection] = set()
        """Frontends that lend nothing more and whose segments still have live views."""
        self._greeting: dict[socket.socket, asyncio.TimerHandle] = {}

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._sock = _listen(self._path)
        self._inode = self._path.stat().st_ino
        self._loop.add_reader(self._sock, self._accept)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._loop.remove_reader(self._sock)
        self._sock.close()
        with suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:  # not the socket of a successor
                self._path.unlink()
        for sock in list(self._greeting):
            self._dismiss(sock)
        for connection in [*self._lenders.values(), *self._leaving]:
            connection.settle()
            connection.close()
        self._lenders.clear()
        self._leaving.clear()

    def __len__(self) -> int:
        """Number of connected frontends."""
        return len(self._lenders)

    def borrow(self, lease: Lease) -> memoryview:
        """Return the bytes of a lease. The lease is returned when the last buffer over them is gone.

        Raises `ProtocolError` if the segment is unknown, the range is outside it, or the lease is already borrowed.
        """
        connection = self._lenders.get(lease.segment)
        if connection is None:
            raise ProtocolError(f"no frontend lends the segment {lease.segment.hex()[:12]}…")
        return connection.borrow(lease)

    def _accept(self) -> None:
        for _ in range(_MAX_CONNECTIONS):
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._pause(error)
                return
            sock.setblocking(False)
            connections = len(self._lenders) + len(self._leaving) + len(self._greeting)
            if not is_same_user(sock) or connections >= _MAX_CONNECTIONS:
                sock.close()
                continue
            self._greeting[sock] = self._loop.call_later(_HELLO_TIMEOUT_S, self._dismiss, sock)
            self._loop.add_reader(sock, self._greet, sock)

    def _pause(self, error: OSError) -> None:
        logger.warning("cannot accept a frontend's shared memory: %s; trying again", error.strerror)
        self._loop.remove_reader(self._sock)
        self._loop.call_later(_BACKOFF_S, self._resume)

    def _resume(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.add_reader(self._sock, self._accept)

    def _greet(self, sock: socket.socket) -> None:
        try:
            segment, window = _receive_segment(sock)
            self._check_new(segment)
        except BlockingIOError:
            return
        except (OSError, ProtocolError) as error:
            logger.warning("refused a frontend's shared memory: %s", error)
            self._dismiss(sock)
            return
        self._greeting.pop(sock).cancel()
        self._loop.remove_reader(sock)
        with suppress(OSError):  # the peer is gone, which reading will report
            sock.send(ACCEPTED)
        self._lenders[segment] = _Connection(sock, window, lambda connection: self._changed(segment, connection))

    def _check_new(self, segment: bytes) -> None:
        """Require one connection per segment: a lease must return over the connection that brought it."""
        if (known := self._lenders.get(segment)) is not None:
            known.catch_up()
        if segment in self._lenders:
            raise ProtocolError(f"the segment {segment.hex()[:12]}… is lent over another connection")

    def _dismiss(self, sock: socket.socket) -> None:
        self._greeting.pop(sock).cancel()
        self._loop.remove_reader(sock)
        sock.close()

    def _changed(self, segment: bytes, connection: _Connection) -> None:
        if not connection.ended:
            return
        if self._lenders.get(segment) is connection:
            del self._lenders[segment]
            self._leaving.add(connection)
        if connection.idle and connection in self._leaving:
            self._leaving.discard(connection)
            connection.close()


def _listen(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        _make_free(path)
        os.fchmod(sock.fileno(), stat.S_IRUSR | stat.S_IWUSR)  # before bind: the file is never open to other users
        sock.bind(str(path))
        sock.listen()
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _make_free(path: Path) -> None:
    """Remove the socket of a worker that no longer runs."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:
            pass
    raise ConfigError(f"another worker borrows at {path}: stop it, or name another address")


def _receive_segment(sock: socket.socket) -> tuple[bytes, Window]:
    """Return the segment that a frontend introduces. Closes every received descriptor."""
    packet, fds, _, _ = socket.recv_fds(sock, HELLO_BYTES + 1, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    try:
        segment, size = read_hello(packet)
        if len(fds) != 1:
            raise ProtocolError(f"a peer introduced a segment with {len(fds)} descriptors instead of one")
        window = Window.attach(fds[0])
        if (found := window.size) != size:
            window.close()
            raise ProtocolError(f"a peer's segment has {found:,} bytes instead of {size:,}")
    finally:
        for fd in fds:
            os.close(fd)
    return segment, window
