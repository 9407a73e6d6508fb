"""The worker's side: one ROUTER for all frontends, one session for each."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

import zmq

from semel.core import Contract, Key
from semel.errors import ConfigError
from semel.wire.codec import Frames
from semel.wire.events import Admitted, Closed, Event, Reset
from semel.wire.limits import Deadlines, Limits
from semel.wire.messages import NONCE_BYTES
from semel.wire.session import Session, ToFrontend
from semel.wire.zmq.address import ZAP_ENDPOINT, SocketFile, admit, secure_server
from semel.wire.zmq.loop import LINGER_MS, Alarm, EventQueue, LoopSocket, configure, end, weight

__all__ = ["Peer", "WorkerListener"]

_log = logging.getLogger(__name__)

_MAX_PEERS: Final = 1024
_MAX_EVENTS: Final = 4096


@dataclass(frozen=True, slots=True)
class Peer:
    """A frontend in one session: after a reset the same frontend is another peer."""

    frontend_id: str
    identity: bytes = field(repr=False)


class WorkerListener:
    """Accepts frontends at one address. Iteration yields `(peer, event)`; an admitted peer ends with Closed or Reset.

    Frontends that never prove that they have the key produce no events; they are counted in `refused` and logged.
    """

    def __init__(
        self,
        address: str,
        *,
        key: Key,
        contract: Contract,
        limits: Limits | None = None,
        deadlines: Deadlines | None = None,
    ) -> None:
        self.address = address
        """The address; once open, with the actual port in place of a `*`."""

        self.refused = 0
        self._key = key
        self._contract = contract
        self._limits = limits or Limits()
        self._deadlines = deadlines or Deadlines()
        self._sessions: dict[bytes, Session] = {}
        self._peers: dict[bytes, Peer] = {}
        self._due: set[bytes] = set()
        """Sessions with messages to send."""

        self._rooms: dict[bytes, asyncio.Event] = {}
        """By session, the event for callers that wait to queue more."""

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._zap = self._open_zap()
        try:
            self._socket = self._bind()
        except BaseException:
            self._zap.close()
            self._context.destroy(0)
            raise
        self._alarm = Alarm(self._on_time)
        self._queue: EventQueue[tuple[Peer, Event]] = EventQueue(
            max_events=_MAX_EVENTS, max_bytes=self._limits.max_feature_bytes, on_room=self._socket.resume
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for session in self._sessions.values():
            session.close("the worker closes")
        self._due.update(self._sessions)
        self._flush()
        self._alarm.cancel()
        self._file.remove()
        self._socket.close(LINGER_MS)
        self._zap.close()
        self._queue.close()
        await end(self._context)

    def __aiter__(self) -> AsyncIterator[tuple[Peer, Event]]:
        return self._queue

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The admitted frontends."""
        return tuple(self._peers.values())

    def send(self, peer: Peer, message: ToFrontend) -> None:
        """Queue a message. A message to a disconnected peer is dropped: the peer's end is among the events."""
        session = self._sessions.get(peer.identity)
        if session is not None and session.is_open:
            session.send(message)
            self._flush_soon(peer.identity)

    async def until_room(self, peer: Peer) -> None:
        """Wait until a peer has read enough to receive more; returns at once for a disconnected peer."""
        # No deadline here: a peer that does not read is silent, and that ends its session.
        while (session := self._sessions.get(peer.identity)) is not None and not session.has_room:
            await self._rooms.setdefault(peer.identity, asyncio.Event()).wait()

    def broadcast(self, message: ToFrontend) -> None:
        """Queue a message for every admitted peer."""
        for peer in self.peers:
            self.send(peer, message)

    def close(self, peer: Peer, message: str, *, code: str = "closed") -> None:
        """Close a peer's session; no event follows. The code says why, unless all is well."""
        session = self._sessions.get(peer.identity)
        if session is not None:
            session.close(message, code=code)
            self._flush_soon(peer.identity)

    def _open_zap(self) -> LoopSocket:
        """Answer the context's ZAP requests: whether a CURVE client may connect."""
        socket = self._context.socket(zmq.REP)
        socket.bind(ZAP_ENDPOINT)
        zap = LoopSocket(socket, lambda frames: zap.send(admit([bytes(frame) for frame in frames], self._key)))
        return zap

    def _bind(self) -> LoopSocket:
        socket = self._context.socket(zmq.ROUTER)
        configure(socket, self._limits, self._deadlines)
        socket.router_mandatory = True
        secure_server(socket, self.address, self._key)
        try:
            socket.bind(self.address)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen on {self.address}: {error.strerror}; name another address") from error
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._file = SocketFile.at(self.address)
        return LoopSocket(socket, self._on_message)

    def _on_message(self, frames: Frames) -> None:
        identity = bytes(frames[0])
        session = self._sessions.get(identity)
        if session is None:
            if len(self._sessions) >= _MAX_PEERS:
                self.refused += 1
                return
            self._sessions[identity] = session = self._new_session()
            self._alarm.set(session.next_deadline())
        self._tell(identity, session.receive(frames[1:], self._loop.time()))
        self._let_in(identity, session)
        self._flush_soon(identity)

    def _new_session(self) -> Session:
        return Session.worker(
            key=self._key,
            contract=self._contract,
            nonce=secrets.token_bytes(NONCE_BYTES),
            now=self._loop.time(),
            limits=self._limits,
            deadlines=self._deadlines,
        )

    def _tell(self, identity: bytes, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Admitted):
                self._peers[identity] = Peer(event.frontend_id, identity)
            ends = isinstance(event, Closed | Reset)
            if (peer := self._peers.pop(identity, None) if ends else self._peers.get(identity)) is not None:
                self._queue.put((peer, event), weight(event))
            elif isinstance(event, Reset):
                self.refused += 1
                _log.warning("refused a frontend at %s (%s): %s", self.address, event.code, event.message)
        if self._queue.is_full:
            self._socket.pause()

    def _let_in(self, identity: bytes, session: Session) -> None:
        """Wake the callers that wait for room, if there is room."""
        if identity in self._rooms and session.has_room:
            self._rooms.pop(identity).set()

    def _flush_soon(self, identity: bytes) -> None:
        if not self._due:
            self._loop.call_soon(self._flush)
        self._due.add(identity)

    def _flush(self) -> None:
        """Send due messages, and remove the sessions that ended with them."""
        due, self._due = self._due, set()
        for identity in due:
            if (session := self._sessions.get(identity)) is None:
                continue
            try:
                for frames in session.outgoing(self._loop.time()):
                    self._socket.send([identity, *frames])
            except zmq.ZMQError as error:
                self._tell(identity, session.reset("gone", f"the frontend is gone: {error.strerror}"))
            if session.has_ended:
                self._tell(identity, session.tick(self._loop.time()))
                del self._sessions[identity]
                self._peers.pop(identity, None)  # this side ended the session
                self._let_in(identity, session)
            else:
                self._alarm.set(session.next_deadline())

    def _on_time(self) -> None:
        now = self._loop.time()
        if self._socket.is_paused:
            # This process does not read, so the silence is not the peer's fault.
            self._alarm.set(now + self._deadlines.heartbeat_s)
            return
        is_late = self._alarm.late_s > self._deadlines.heartbeat_s
        for identity, session in self._sessions.items():
            if is_late:
                session.excuse(now)
            self._tell(identity, session.tick(now))
        self._due.update(self._sessions)
        self._flush()
