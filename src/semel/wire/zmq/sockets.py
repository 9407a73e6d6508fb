"""Sockets of links and listeners: zmq's, unless others are passed, such as those of a simulated network.

A socket reports messages, and the end of its connection, to the callbacks that it was opened with. All of its methods
and callbacks belong to one event loop.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from semel.errors import ConfigError
from semel.wire.codec import Buffer, Frames
from semel.wire.keys import Generation, TransportKeys
from semel.wire.limits import Deadlines, Limits
from semel.wire.zmq.address import ZAP_ENDPOINT, SocketFile, admit, secure_client, secure_server
from semel.wire.zmq.loop import LoopBudget, LoopSocket, configure, end

__all__ = ["NO_KEYS_MATCH", "ClientSockets", "ServerSockets", "SessionSocket", "ZmqClientSockets", "ZmqServerSockets"]

NO_KEYS_MATCH: Final = "no handshake: are both keys of one fleet?"
"""Why a connection broke that could not be encrypted."""

_IDENTITY_BYTES: Final = 16
_BROKEN: Final = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

OnMessage = Callable[[Frames], None]
OnBroken = Callable[[str], None]
"""Called with the reason why a connection broke."""


class SessionSocket(Protocol):
    """A socket that sends at once or not at all, and can stop reading."""

    @property
    def is_paused(self) -> bool:
        """Return whether nothing is read, because the owner asked for that."""
        ...

    @property
    def is_waiting(self) -> bool:
        """Return whether messages wait until others have been read."""
        ...

    def send(self, frames: Sequence[Buffer]) -> None:
        """Send a message; a `zmq.ZMQError` if its reader is gone."""
        ...

    def pause(self) -> None:
        """Stop reading."""
        ...

    def resume(self) -> None:
        """Continue reading."""
        ...

    def drain(self) -> None:
        """Read all that has arrived, now."""
        ...

    def close(self, linger_ms: int = 0) -> None:
        """Close it; messages not sent within the time are lost."""
        ...


class ClientSockets(Protocol):
    """Opens the sockets of a link, one after another."""

    def connect(self, address: str, key: Generation, on_message: OnMessage, on_broken: OnBroken) -> SessionSocket:
        """Return a socket that connects to an address; a `ConfigError` if that is none."""
        ...

    async def close(self) -> None:
        """Let go of what the sockets shared."""
        ...


class ServerSockets(Protocol):
    """Opens the sockets of a listener: one for each generation of keys."""

    def bind(
        self, address: str, key: Generation, on_message: OnMessage, *, beside_another: bool
    ) -> tuple[str, SessionSocket]:
        """Return a socket that listens, and its actual address. The first frame of its messages names the peer."""
        ...

    def remove_file(self) -> None:
        """Remove the file of the address, if it has one."""
        ...

    async def close(self, *, at_once: bool = False) -> None:
        """Let go of what the sockets shared."""
        ...


class _MonitoredSocket(LoopSocket):
    """A socket with its monitor, which tells the end of its connection."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        monitor: zmq.Socket[bytes],
        on_message: OnMessage,
        on_broken: OnBroken,
        budget: LoopBudget | None,
    ) -> None:
        super().__init__(socket, on_message, budget)

        def on_event(frames: Frames) -> None:
            event = parse_monitor_message([bytes(frame) for frame in frames])["event"]
            closed = event == zmq.EVENT_DISCONNECTED
            on_broken("it was closed" if closed else NO_KEYS_MATCH)

        self._monitor = LoopSocket(monitor, on_event)

    def close(self, linger_ms: int = 0) -> None:
        # In this order: zmq's own thread hangs forever when it reports an event to a closed monitor.
        super().close(linger_ms)
        self._monitor.close()


class ZmqClientSockets:
    """Sockets in a context, which many links may share; without one it has its own."""

    def __init__(
        self,
        limits: Limits,
        deadlines: Deadlines,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        budget: LoopBudget | None = None,
    ) -> None:
        self._limits = limits
        self._deadlines = deadlines
        self._context = context or zmq.Context()
        self._owns_context = context is None
        self._budget = budget

    def connect(self, address: str, key: Generation, on_message: OnMessage, on_broken: OnBroken) -> SessionSocket:
        """Return a connected socket with an identity of its own."""
        opened: list[zmq.Socket[bytes]] = []
        try:
            opened.append(socket := self._context.socket(zmq.DEALER))
            configure(socket, self._limits, self._deadlines)
            # zmq reserves identities that begin with a zero.
            socket.routing_id = b"f" + secrets.token_bytes(_IDENTITY_BYTES)
            # pyzmq would name the monitor by a descriptor, which a lingering socket may still have.
            events = f"inproc://semel.link.{secrets.token_hex(_IDENTITY_BYTES)}"
            socket.monitor(events, _BROKEN)
            opened.append(monitor := self._context.socket(zmq.PAIR))
            monitor.connect(events)
            secure_client(socket, address, key)
            socket.connect(address)
        except (ConfigError, zmq.ZMQError) as error:
            for one in opened:
                one.disable_monitor()
                one.close(0)
            raise ConfigError(f"cannot connect to {address}: {error}") from error
        return _MonitoredSocket(socket, monitor, on_message, on_broken, self._budget)

    async def close(self) -> None:
        """End the context, unless it is shared."""
        if self._owns_context:
            await end(self._context)


class ZmqServerSockets:
    """Sockets in a context of their own, whose CURVE clients are admitted by the keys of the moment."""

    def __init__(self, limits: Limits, deadlines: Deadlines, keys: Callable[[], TransportKeys]) -> None:
        self._limits = limits
        self._deadlines = deadlines
        self._file = SocketFile(None)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._zap = self._open_zap(keys)

    def bind(
        self, address: str, key: Generation, on_message: OnMessage, *, beside_another: bool
    ) -> tuple[str, SessionSocket]:
        """Return a bound ROUTER."""
        socket = self._context.socket(zmq.ROUTER)
        try:
            configure(socket, self._limits, self._deadlines)
            socket.router_mandatory = True
            secure_server(socket, address, key, beside_another=beside_another)
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close(0)
            raise ConfigError(f"cannot listen on {address}: {error.strerror}; name another address") from error
        except ConfigError:
            socket.close(0)
            raise
        actual = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._file = SocketFile.at(actual)
        return actual, LoopSocket(socket, on_message)

    def remove_file(self) -> None:
        """Remove the file of an `ipc://` address."""
        self._file.remove()

    async def close(self, *, at_once: bool = False) -> None:
        """End the context; its sockets are closed, unless it ends at once."""
        self._zap.close()
        if at_once:
            self._context.destroy(0)
        else:
            await end(self._context)

    def _open_zap(self, keys: Callable[[], TransportKeys]) -> LoopSocket:
        """Answer the context's ZAP requests: whether a CURVE client may connect."""
        socket = self._context.socket(zmq.REP)
        socket.bind(ZAP_ENDPOINT)
        zap = LoopSocket(socket, lambda frames: zap.send(admit([bytes(frame) for frame in frames], keys())))
        return zap
