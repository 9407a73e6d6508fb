"""Sockets over a simulated network, for shipped links and listeners: they behave as zmq's DEALER and mandatory ROUTER.

A socket that connects where nobody listens tries again, as zmq does, and its messages wait. A listener that is killed
says nothing; one that is closed has said everything. To a peer that is gone nothing can be sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import zmq

from semel.lab.simulate.network import Connection, Network
from semel.wire.codec import Buffer, Frames
from semel.wire.keys import Generation

__all__ = ["Addresses", "VirtualClientSockets", "VirtualServerSockets"]

_TRY_S: Final = 0.1
"""Between two tries of zmq to connect."""

OnMessage = Callable[[Frames], None]


class _Reader:
    """Reads messages in order, unless it is paused."""

    is_waiting = False

    def __init__(self, network: Network, on_message: OnMessage) -> None:
        self.is_paused = False
        self._network = network
        self._on_message = on_message
        self._unread: deque[Frames] = deque()
        self._is_closed = False

    def take(self, frames: Frames) -> None:
        """A message has arrived."""
        self._unread.append(frames)
        self._read()

    def pause(self) -> None:
        """Stop reading."""
        self.is_paused = True

    def resume(self) -> None:
        """Continue reading."""
        if self.is_paused:
            self.is_paused = False
            self._network.loop.call_soon(self._read)

    def drain(self) -> None:
        """Read all that has arrived, now."""
        self._read(is_last=True)

    def stop(self) -> None:
        """Read no more."""
        self._is_closed = True
        while self._unread:
            self._network.lose(self._unread.popleft())

    def _read(self, *, is_last: bool = False) -> None:
        while self._unread and (is_last or not self.is_paused) and not self._is_closed:
            frames = self._unread.popleft()
            self._network.count_read(frames if isinstance(self, _ClientSocket) else frames[1:])
            self._on_message(frames)
        if self._is_closed:
            self.stop()


class Addresses:
    """The listeners by address."""

    def __init__(self) -> None:
        self.listening: dict[str, _ServerSocket] = {}


class _ClientSocket(_Reader):
    def __init__(
        self,
        network: Network,
        addresses: Addresses,
        frontend: str,
        address: str,
        identity: bytes,
        on_message: OnMessage,
        on_broken: Callable[[str], None],
    ) -> None:
        super().__init__(network, on_message)
        self.identity = identity
        self._addresses = addresses
        self._frontend = frontend
        self._address = address
        self._on_broken = on_broken
        self._waiting: list[Frames] = []
        self._server: _ServerSocket | None = None
        self._connection: Connection | None = None
        self._connect()

    def _connect(self) -> None:
        network = self._network
        if self._is_closed:
            return
        server = self._addresses.listening.get(self._address)
        if server is None or network.is_cut(self._frontend, self._address):
            network.loop.call_later(_TRY_S, self._connect)
            return
        self._connection = Connection(
            network,
            self._frontend,
            self._address,
            lambda frames: server.take([self.identity, *frames]),
            self._arrive,
            self._break,
        )
        network.connections[self._connection] = None
        server.peers[self.identity] = self._connection
        waiting, self._waiting = self._waiting, []
        for frames in waiting:
            self._connection.to_worker.send(frames)

    def send(self, frames: Sequence[Buffer]) -> None:
        """Send a message, or let it wait until there is a connection."""
        message = list(frames)
        self._network.count_sent("to_workers", message)
        if self._connection is None:
            self._waiting.append(message)
        else:
            self._connection.to_worker.send(message)

    def close(self, linger_ms: int = 0) -> None:
        """Close it; what was sent arrives if it may linger."""
        if self._is_closed:
            return
        self.stop()
        for frames in self._waiting:
            self._network.lose(frames)
        connection, network = self._connection, self._network
        if connection is None or connection not in network.connections:
            return

        def forget() -> None:
            network.connections.pop(connection, None)
            server = self._addresses.listening.get(self._address)
            if server is not None and server.peers.get(self.identity) is connection:
                del server.peers[self.identity]
            for pipe in connection.pipes:
                pipe.close()

        if linger_ms:
            connection.to_worker.end(forget)
        else:
            forget()

    def _arrive(self, frames: Frames) -> None:
        if self._is_closed:
            self._network.lose(frames)
        else:
            self.take(frames)

    def _break(self, why: str) -> None:
        if not self._is_closed:
            self._on_broken(why)


class _ServerSocket(_Reader):
    def __init__(self, network: Network, addresses: Addresses, address: str, on_message: OnMessage) -> None:
        super().__init__(network, on_message)
        self.peers: dict[bytes, Connection] = {}
        self._addresses = addresses
        self._address = address
        addresses.listening[address] = self

    def send(self, frames: Sequence[Buffer]) -> None:
        """Send a message to the peer that its first frame names."""
        if self._is_closed:
            return  # the process is dead
        connection = self.peers.get(bytes(frames[0]))
        if connection is None or connection not in self._network.connections:
            self.peers.pop(bytes(frames[0]), None)
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        message = list(frames[1:])
        self._network.count_sent("to_frontends", message)
        connection.to_frontend.send(message)

    def close(self, linger_ms: int = 0) -> None:
        """Listen no more. What was sent arrives, then frontends notice that it is gone."""
        if self._is_closed:
            return
        self.stop()
        if self._addresses.listening.get(self._address) is self:
            del self._addresses.listening[self._address]
        for connection in self.peers.values():
            if connection in self._network.connections:
                connection.to_worker.close()
                connection.to_frontend.end(lambda connection=connection: self._network.sever(connection))  # type: ignore[misc]
                if not linger_ms:
                    self._network.sever(connection)

    def take(self, frames: Frames) -> None:
        """A message has arrived, behind the name of its sender."""
        if self._is_closed:
            self._network.lose(frames[1:])
        else:
            super().take(frames)

    def stop(self) -> None:
        """Read no more."""
        self._is_closed = True
        while self._unread:
            self._network.lose(self._unread.popleft()[1:])


class VirtualClientSockets:
    """The sockets of one frontend's link to one worker."""

    def __init__(self, network: Network, addresses: Addresses, frontend: str) -> None:
        self._network = network
        self._addresses = addresses
        self._frontend = frontend
        self._opened: list[_ClientSocket] = []

    def connect(
        self,
        address: str,
        key: Generation,  # noqa: ARG002 - the network needs none
        on_message: OnMessage,
        on_broken: Callable[[str], None],
    ) -> _ClientSocket:
        """Return a socket that connects, as soon as somebody listens."""
        identity = f"{self._frontend}/{self._network.number()}".encode()
        socket = _ClientSocket(self._network, self._addresses, self._frontend, address, identity, on_message, on_broken)
        self._opened = [one for one in self._opened if not one._is_closed] + [socket]
        return socket

    def kill(self) -> None:
        """The process is gone: nothing more is sent or read."""
        for socket in self._opened:
            socket.close()

    async def close(self) -> None:
        """Nothing is shared."""


class VirtualServerSockets:
    """The sockets of one worker."""

    def __init__(self, network: Network, addresses: Addresses) -> None:
        self._network = network
        self._addresses = addresses
        self._bound: list[_ServerSocket] = []

    def bind(
        self,
        address: str,
        key: Generation,  # noqa: ARG002
        on_message: OnMessage,
        *,
        beside_another: bool,  # noqa: ARG002
    ) -> tuple[str, _ServerSocket]:
        """Return a socket that listens."""
        self._bound.append(socket := _ServerSocket(self._network, self._addresses, address, on_message))
        return address, socket

    def remove_file(self) -> None:
        """There is none."""

    def kill(self) -> None:
        """The process is gone."""
        for socket in self._bound:
            socket.close()

    async def close(self, *, at_once: bool = False) -> None:
        """Nothing is shared."""
