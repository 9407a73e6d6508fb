"""The frontend's side: one DEALER and one session at a time, and a new pair after every end.

The owner reads the events behind the link: a session may have been replaced by the time its end is read. So what is
sent goes into a session that the owner names, the one whose `Connected` it has read, or nowhere.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from random import uniform
from types import TracebackType
from typing import Final, Self

import zmq
from zmq.utils.monitor import parse_monitor_message

from semel.core import Contract, Digest, Feature, Key
from semel.errors import ConfigError
from semel.wire.codec import Frames
from semel.wire.events import Event, Opened, Reset
from semel.wire.limits import Deadlines, Limits
from semel.wire.messages import NONCE_BYTES
from semel.wire.session import Session, ToWorker
from semel.wire.zmq.address import secure_client
from semel.wire.zmq.loop import LINGER_MS, Alarm, EventQueue, LoopSocket, configure, end, weight

__all__ = ["Backoff", "Connected", "FrontendLink", "LinkSession"]

_MAX_EVENTS: Final = 4096
_IDENTITY_BYTES: Final = 16
_BROKEN: Final = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


@dataclass(frozen=True, slots=True)
class Backoff:
    """The delay before a frontend connects again: doubled with each attempt."""

    first_s: float = 0.05
    max_s: float = 2.0

    def delay_s(self, failures: int) -> float:
        """The delay before the next attempt, with jitter, so that a fleet does not connect all at once."""
        return min(self.max_s, self.first_s * 2.0 ** min(failures, 30)) * uniform(0.5, 1.0)


class LinkSession:
    """One session of a link, to send into. It never becomes another one."""

    def __init__(
        self, session: Session, flush_soon: Callable[[], None], on_events: Callable[[list[Event]], None]
    ) -> None:
        self._session = session
        self._flush_soon = flush_soon
        self._on_events = on_events

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent now."""
        return self._session.is_open

    @property
    def takes_submits(self) -> bool:
        """Whether it is open and neither end is draining."""
        return self._session.takes_submits

    def send(self, message: ToWorker) -> None:
        """Queue a message; raises `ProtocolError` once the session has ended.

        The message may itself end the session, if the worker has left too much unread: that is among the events.
        """
        self._session.send(message)
        self._flush_soon()

    def send_feature(self, digest: Digest, feature: Feature) -> int:
        """Queue a feature after all messages; returns the number of its transfer. Raises as `send` does."""
        number = self._session.send_feature(digest, feature)
        self._flush_soon()
        return number

    def withdraw(self, transfer: int) -> None:
        """Do not send the rest of a feature, if any: it is not needed."""
        self._session.withdraw(transfer)
        self._flush_soon()

    def reset(self, message: str) -> None:
        """End the session because the worker broke a rule that only the reader checks; a new one is opened."""
        self._on_events(self._session.reset("order", message))
        self._flush_soon()


@dataclass(frozen=True, slots=True)
class Connected:
    """A session is open: what to send into it with, and the worker's contract."""

    session: LinkSession
    contract: Contract


@dataclass(frozen=True, slots=True)
class _Attempt:
    session: Session
    socket: LoopSocket
    monitor: LoopSocket

    def close(self, linger_ms: int) -> None:
        # In this order: zmq's own thread hangs forever when it reports an event to a closed monitor.
        self.socket.close(linger_ms)
        self.monitor.close()


class FrontendLink:
    """A frontend's connection to one worker, opened again after every end until it is closed.

    Iteration yields the events; a session begins with Connected and ends with Closed or Reset. A failed attempt yields
    a Reset with its reason: the owner decides whether to wait on after `key` or `protocol`. Many links should share one
    context, and with it one I/O thread.
    """

    def __init__(
        self,
        address: str,
        *,
        key: Key,
        frontend_id: str,
        limits: Limits | None = None,
        deadlines: Deadlines | None = None,
        backoff: Backoff | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self.address = address
        self._key = key
        self._frontend_id = frontend_id
        self._limits = limits or Limits()
        self._deadlines = deadlines or Deadlines()
        self._backoff = backoff or Backoff()
        self._context = context or zmq.Context()
        self._owns_context = context is None
        self._failures = 0
        self._attempt: _Attempt | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._is_due = False

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._alarm = Alarm(self._on_time)
        self._queue: EventQueue[Event | Connected] = EventQueue(
            max_events=_MAX_EVENTS, max_bytes=self._limits.max_feature_bytes, on_room=self._resume
        )
        try:
            self._connect()
        except BaseException:
            if self._owns_context:
                self._context.destroy(0)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._retry is not None:
            self._retry.cancel()
        self._alarm.cancel()
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.session.close("the frontend closes")
            self._put_out(attempt)
            attempt.close(LINGER_MS)
        self._queue.close()
        if self._owns_context:
            await end(self._context)

    def __aiter__(self) -> AsyncIterator[Event | Connected]:
        return self._queue

    def _connect(self) -> None:
        session = Session.frontend(
            key=self._key,
            frontend_id=self._frontend_id,
            nonce=secrets.token_bytes(NONCE_BYTES),
            now=self._loop.time(),
            limits=self._limits,
            deadlines=self._deadlines,
        )
        self._attempt = _Attempt(session, *self._open_sockets())
        self._send_all(self._attempt)

    def _open_sockets(self) -> tuple[LoopSocket, LoopSocket]:
        """A connected socket, and its monitor."""
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
            secure_client(socket, self.address, self._key)
            socket.connect(self.address)
        except (ConfigError, zmq.ZMQError) as error:
            for one in opened:
                one.disable_monitor()
                one.close(0)
            raise ConfigError(f"cannot connect to {self.address}: {error}") from error
        return LoopSocket(socket, self._on_message), LoopSocket(monitor, self._on_broken)

    def _on_message(self, frames: Frames) -> None:
        if self._attempt is not None:
            self._tell(self._attempt.session.receive(frames, self._loop.time()))
            self._flush_soon()

    def _on_broken(self, frames: Frames) -> None:
        event = parse_monitor_message([bytes(frame) for frame in frames])["event"]
        if self._attempt is not None:
            self._attempt.socket.drain()  # the last messages arrived before the end
            why = "it was closed" if event == zmq.EVENT_DISCONNECTED else "no handshake: is the fleet key the same?"
            self._tell(self._attempt.session.reset("gone", f"the connection to {self.address} broke: {why}"))
            self._flush_soon()

    def _tell(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Opened) and self._attempt is not None:
                self._failures = 0
                session = LinkSession(self._attempt.session, self._flush_soon, self._tell)
                self._queue.put(Connected(session, event.contract), 0)
            else:
                self._queue.put(event, weight(event))
        if self._queue.is_full and self._attempt is not None:
            self._attempt.socket.pause()

    def _resume(self) -> None:
        if self._attempt is not None:
            self._attempt.socket.resume()

    def _flush_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_due = False
        if self._attempt is not None:
            self._send_all(self._attempt)

    def _put_out(self, attempt: _Attempt) -> None:
        try:
            for frames in attempt.session.outgoing(self._loop.time()):
                attempt.socket.send(frames)
        except zmq.ZMQError as error:
            self._tell(attempt.session.reset("gone", f"cannot send to {self.address}: {error.strerror}"))

    def _send_all(self, attempt: _Attempt) -> None:
        """Send due messages; if this ends the session, connect again later."""
        self._put_out(attempt)
        if not attempt.session.has_ended:
            self._alarm.set(attempt.session.next_deadline())
            return
        self._tell(attempt.session.tick(self._loop.time()))
        attempt.close(LINGER_MS)
        self._attempt = None
        self._retry_later()

    def _retry_later(self) -> None:
        self._retry = self._loop.call_later(self._backoff.delay_s(self._failures), self._reconnect)
        self._failures += 1

    def _reconnect(self) -> None:
        try:
            self._connect()
        except ConfigError as error:  # the directory has changed, and may change back
            self._tell([Reset("gone", str(error))])
            self._retry_later()

    def _on_time(self) -> None:
        if self._attempt is None:
            return
        now = self._loop.time()
        if self._attempt.socket.is_paused:
            # This process does not read, so the silence is not the peer's fault.
            self._alarm.set(now + self._deadlines.heartbeat_s)
            return
        if self._alarm.late_s > self._deadlines.heartbeat_s:
            self._attempt.session.excuse(now)
        self._tell(self._attempt.session.tick(now))
        self._send_all(self._attempt)
