"""Connections to a node of the store: commands out, replies in, each by a deadline."""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from semel.embeddings.address import StoreAddress
from semel.embeddings.protocol import StoreDown, StoreError, StoreLate
from semel.embeddings.replies import Malformed, Refusal, Replies, command

__all__ = ["Connection", "Pool", "connect"]

_CONNECT_S: Final = 5.0

_SMALL_BYTES: Final = 16 << 10
"""Pieces up to this are put together: a system call costs more than to copy them."""

Command = Iterable[bytes | memoryview]


class Connection:
    """Used by one thread at a time. After any exception but a `Refusal` it can only be closed."""

    def __init__(self, raw: socket.socket) -> None:
        raw.setblocking(False)  # a socket with a timeout makes two more system calls for each one that reads
        self._socket = raw
        self._poll = select.poll()
        self._deadline = 0.0
        self.replies = Replies(self._receive)

    def exchange(
        self, commands: Iterable[Command], read: Callable[[], object], *, window: int, deadline: float
    ) -> None:
        """Send commands, at most so many ahead of their replies, and call `read` for each reply.

        After the first refusal nothing more is sent, and it is raised when all replies have come.
        """
        self._deadline = deadline
        queue = iter(commands)
        refusal: Refusal | None = None
        ahead = 0
        with _mapped_errors():
            while True:
                if refusal is None:
                    ahead += self._send(queue, window - ahead)
                if not ahead:
                    break
                try:
                    read()
                except Refusal as error:
                    refusal = refusal or error
                ahead -= 1
        if refusal is not None:
            raise refusal

    def is_idle(self) -> bool:
        """Return whether nobody has closed it, and nothing has come that was not asked for."""
        if not self.replies.is_empty:
            return False
        try:
            self._poll.register(self._socket, select.POLLIN)
            return not self._poll.poll(0)
        except (OSError, ValueError):
            return False

    def shut(self) -> None:
        """End what another thread is doing with it."""
        with suppress(OSError):  # that of an `SSLSocket` ends TLS first, and what is sent meanwhile goes out plain
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it, whatever state it is in."""
        self._socket.close()

    def _send(self, commands: Iterator[Command], count: int) -> int:
        """Send the next commands, and return how many there were."""
        small = bytearray()
        sent = 0
        while sent < count and (parts := next(commands, None)) is not None:
            for part in parts:
                if len(part) <= _SMALL_BYTES:
                    small += part
                    continue
                self._send_all(small)
                small.clear()
                self._send_all(part)
            sent += 1
        self._send_all(small)
        return sent

    def _send_all(self, data: bytes | bytearray | memoryview) -> None:
        with memoryview(data) as view:
            position = 0
            while position < view.nbytes:
                _remaining(self._deadline)
                try:
                    position += self._socket.send(view[position:])
                except (BlockingIOError, ssl.SSLWantWriteError):
                    self._wait(select.POLLOUT)
                except ssl.SSLWantReadError:
                    self._wait(select.POLLIN)

    def _receive(self, target: memoryview) -> int:
        while True:
            _remaining(self._deadline)
            try:
                count = self._socket.recv_into(target)
            except (BlockingIOError, ssl.SSLWantReadError):
                self._wait(select.POLLIN)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT)
            else:
                if not count:
                    raise StoreDown("the embedding store closed the connection")
                return count

    def _wait(self, event: int) -> None:
        """Wait until the socket can be read or written, or the deadline is over."""
        self._poll.register(self._socket, event)
        if not self._poll.poll(1_000 * _remaining(self._deadline)):
            raise StoreLate("the embedding store did not answer in time")


def connect(address: StoreAddress, tls: ssl.SSLContext | None, password: str | None, deadline: float) -> Connection:
    """Open a connection that takes commands."""
    with _mapped_errors():
        raw = _open_socket(address, deadline)
        try:
            if tls is not None:
                raw.settimeout(_remaining(deadline))
                raw = tls.wrap_socket(raw, server_hostname=address.host)
            connection = Connection(raw)
            _greet(connection, address.user, password, deadline)
        except BaseException:
            raw.close()
            raise
    return connection


def _greet(connection: Connection, user: str | None, password: str | None, deadline: float) -> None:
    """Log in, and see that commands are taken. What TLS sends by itself after a handshake is read here, too."""
    replies = connection.replies
    if password is not None:
        users = [] if user is None else [user.encode()]
        login = command(b"AUTH", *users, password.encode())
        try:
            connection.exchange([[login]], lambda: replies.simple(b"OK"), window=1, deadline=deadline)
        except Refusal as refusal:
            raise refusal.login_error() from None
        except Malformed:
            raise Malformed("the embedding store answered the login with something that is no answer to it") from None
    connection.exchange([[command(b"PING")]], lambda: replies.simple(b"PONG"), window=1, deadline=deadline)


def _open_socket(address: StoreAddress, deadline: float) -> socket.socket:
    if address.path is None:
        raw = socket.create_connection((address.host, address.port), _remaining(deadline))
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return raw
    raw = socket.socket(socket.AF_UNIX)
    try:
        raw.settimeout(_remaining(deadline))
        raw.connect(address.path)
    except BaseException:
        raw.close()
        raise
    return raw


def _remaining(deadline: float) -> float:
    if (seconds := deadline - time.monotonic()) <= 0:
        raise StoreLate("the embedding store did not answer in time")
    return seconds


@contextmanager
def _mapped_errors() -> Iterator[None]:
    """Say what a socket says in our own words; the addresses stay in the log of those who know them."""
    try:
        yield
    except TimeoutError as error:
        raise StoreLate("the embedding store did not answer in time") from error
    except ssl.SSLCertVerificationError as error:
        raise StoreDown(f"the embedding store's certificate is not valid: {error.verify_message}") from error
    except (OSError, ValueError) as error:  # a ValueError is what a closed TLS socket raises
        raise StoreDown(f"the embedding store cannot be reached: {error}") from error


class Pool:
    """At most `limit` connections to one node, open or being opened, shared by threads.

    A connection is opened by a thread of its own, which has more time than a call: a call that comes meanwhile waits
    for it no longer than its deadline, and the next one finds it open. So neither a slow handshake nor a name server
    can hold a call, and a store that is farther away than a fetch may take is still reached.
    """

    def __init__(self, connect: Callable[[float], Connection], limit: int) -> None:
        self._connect = connect
        self._limit = limit
        self._changed = threading.Condition()
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._opening = 0
        self._failures = 0
        self._failure: StoreError = StoreDown("the embedding store is not connected")
        self._is_closed = False

    @contextmanager
    def connection(self, deadline: float) -> Iterator[Connection]:
        """Lend a connection for one exchange. It is kept if that ends well, or with a store that is full."""
        connection = self._take(deadline)
        is_usable = False
        try:
            yield connection
            is_usable = True
        except Refusal as refusal:
            is_usable = refusal.code == "OOM"
            raise refusal.error() from refusal
        finally:
            self._give_back(connection, is_usable=is_usable)

    def close(self) -> None:
        """Close all connections, also those in use. Nobody gets one any more."""
        with self._changed:
            self._is_closed = True
            for connection in self._idle:
                connection.close()
            self._idle.clear()
            for connection in self._busy:
                connection.shut()
            self._changed.notify_all()

    def _take(self, deadline: float) -> Connection:
        with self._changed:
            failures = self._failures
            while not self._is_closed:
                while self._idle:
                    connection = self._idle.pop()
                    if connection.is_idle():
                        self._busy.add(connection)
                        return connection
                    connection.close()
                if failures != self._failures:
                    raise self._failure
                if len(self._busy) + self._opening < self._limit:
                    self._opening += 1
                    threading.Thread(target=self._open, name="semel-embedding-store", daemon=True).start()
                if not self._changed.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    raise StoreLate("the embedding store gave no connection in time")
            raise StoreDown("the connections to the embedding store were closed")

    def _give_back(self, connection: Connection, *, is_usable: bool) -> None:
        with self._changed:
            self._busy.discard(connection)
            if is_usable and not self._is_closed:
                self._idle.append(connection)
            else:
                connection.close()
            self._changed.notify()

    def _open(self) -> None:
        connection: Connection | None = None
        failure: StoreError | None = None
        try:
            connection = self._connect(time.monotonic() + _CONNECT_S)
        except Refusal as refusal:
            failure = refusal.error()
        except StoreError as error:
            failure = error
        with self._changed:
            self._opening -= 1
            if connection is not None and not self._is_closed:
                self._idle.append(connection)
            elif connection is not None:
                connection.close()
            else:
                self._failures += 1
                self._failure = failure or self._failure
            self._changed.notify_all()
