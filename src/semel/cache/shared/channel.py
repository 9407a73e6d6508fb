"""The Unix socket over which a worker returns leases, and its handshake.

The socket preserves packet boundaries (`SOCK_SEQPACKET`). The first packet introduces a segment and carries its
descriptor. The reply is `ok`. All other packets contain returned lease ids of 8 bytes each. `Lender` and `Borrower`
define their meaning.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final

from semel.cache.shared.segment import SEGMENT_ID_BYTES
from semel.errors import ProtocolError

__all__ = ["ACCEPTED", "HELLO_BYTES", "MAX_LEASES", "Channel", "encode_hello", "is_same_user", "read_hello"]

ACCEPTED: Final = b"ok"
MAX_LEASES: Final = 65_536
"""Maximum number of open leases per connection."""

_MAGIC: Final = b"semel.share.1"
_HELLO: Final = struct.Struct(f"<{len(_MAGIC)}s{SEGMENT_ID_BYTES}sQ")
HELLO_BYTES: Final = _HELLO.size
_ID_BYTES: Final = 8
_IDS_PER_PACKET: Final = 1_024
_PACKETS_PER_TURN: Final = 64
_PEER: Final = struct.Struct("3i")  # SO_PEERCRED: process, user, group

logger = logging.getLogger(__name__)


def encode_hello(segment: bytes, size: int) -> bytes:
    """Return the first packet, sent with the segment's descriptor."""
    return _HELLO.pack(_MAGIC, segment, size)


def read_hello(packet: bytes) -> tuple[bytes, int]:
    """Return the id and size of the segment that a peer introduces."""
    if len(packet) != HELLO_BYTES or not packet.startswith(_MAGIC):
        raise ProtocolError(f"a peer introduced no segment: its first packet has {len(packet)} bytes")
    _, segment, size = _HELLO.unpack(packet)
    return segment, size


def is_same_user(peer: socket.socket) -> bool:
    """Return whether the peer process runs as the same user."""
    _, user, _ = _PEER.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return bool(user == os.geteuid())


class Channel:
    """A channel of lease ids that never blocks. Ids that find the socket full are sent later, in order."""

    def __init__(
        self, sock: socket.socket, *, on_ids: Callable[[tuple[int, ...]], None], on_end: Callable[[], None]
    ) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._on_ids: Callable[[tuple[int, ...]], None] | None = on_ids
        self._on_end: Callable[[], None] | None = on_end
        self._pending: deque[int] = deque()
        self._is_full = False
        weakref.finalize(self, sock.close).atexit = False  # in case the event loop ended first
        self._loop.add_reader(sock, self.read)

    def send(self, ids: Iterable[int]) -> None:
        """Send these ids, now or as soon as the socket accepts them."""
        self._pending.extend(ids)
        self._flush()

    def read(self) -> None:
        """Process received packets."""
        for _ in range(_PACKETS_PER_TURN):
            try:
                packet = self._sock.recv(_IDS_PER_PACKET * _ID_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                packet = b""
            if not packet:
                self._end()
                return
            if len(packet) % _ID_BYTES:
                logger.warning("ignored a packet of %d bytes, which is no list of leases", len(packet))
            elif self._on_ids is not None:
                self._on_ids(struct.unpack(f"<{len(packet) // _ID_BYTES}Q", packet))
            if self._on_ids is None:
                return

    def finish(self) -> None:
        """Announce that no more ids follow; the peer may still send."""
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._end()

    def close(self) -> None:
        """Close the connection, which the peer notices."""
        self._let_go()
        self._sock.close()

    def detach(self) -> int:
        """Leave the connection open, as a bare descriptor, before the event loop ends."""
        self._let_go()
        return self._sock.detach()

    def _flush(self) -> None:
        while self._pending:
            batch = tuple(islice(self._pending, _IDS_PER_PACKET))
            try:
                self._sock.send(struct.pack(f"<{len(batch)}Q", *batch))
            except (BlockingIOError, InterruptedError):
                self._loop.add_writer(self._sock, self._flush)
                self._is_full = True
                return
            except OSError:  # the peer is gone; reading reports the end
                self._pending.clear()
                break
            for _ in batch:
                self._pending.popleft()
        if self._is_full:
            self._loop.remove_writer(self._sock)
            self._is_full = False

    def _end(self) -> None:
        self._loop.remove_reader(self._sock)
        if (on_end := self._on_end) is not None:
            self._on_end = None
            on_end()

    def _let_go(self) -> None:
        self._on_ids = self._on_end = None  # they refer to the owner of this channel
        if self._sock.fileno() >= 0 and not self._loop.is_closed():
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
