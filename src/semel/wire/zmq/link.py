"""The frontend's side: one DEALER and one session at a time, and a new pair after every end.

The owner reads the events behind the link: a session may have been replaced by the time its end is read. So what is
sent goes into a session that the owner names, the one whose `Connected` it has read, or nowhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from random import Random, SystemRandom
from types import TracebackType
from typing import Final, Self

import zmq

from semel.core import Contract, Digest, Feature, Key
from semel.errors import ConfigError
from semel.wire.codec import Frames
from semel.wire.events import Event, Opened, Reset
from semel.wire.handshake import FrontendHandshake
from semel.wire.keys import Generation, TransportKeys
from semel.wire.limits import Deadlines, Limits
from semel.wire.messages import NONCE_BYTES, Resume, ToWorker
from semel.wire.session import Session
from semel.wire.zmq.address import transport_keys
from semel.wire.zmq.backoff import NO_HANDSHAKE, Backoff, Retries
from semel.wire.zmq.loop import LINGER_MS, Alarm, EventQueue, LoopBudget
from semel.wire.zmq.sockets import NO_KEYS_MATCH, ClientSockets, SessionSocket, ZmqClientSockets

__all__ = ["Connected", "FrontendLink", "LinkSession"]

_MAX_EVENTS: Final = 4096
_WATCHED: Final = frozenset({"protocol", "key"})
"""Refusals that last as long as the worker is the same, unless its keys change."""

_SYSTEM: Final = SystemRandom()


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
        """Return whether messages can be sent now."""
        return self._session.is_open

    @property
    def takes_submits(self) -> bool:
        """Return whether it is open and neither end is draining."""
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
    generation: int = 0
    """Of the keys that it was opened with."""

    incarnation: bytes = b""
    """Of the worker's process."""


@dataclass(frozen=True, slots=True)
class _Attempt:
    generation: Generation
    session: Session
    socket: SessionSocket


class FrontendLink:
    """A frontend's connection to one worker, opened again after every end until it is closed.

    Iteration yields the events; a session begins with Connected and ends with Closed or Reset. A failed attempt yields
    a Reset with its reason: the owner decides whether to wait on after `key` or `protocol`. Many links share one
    context (`link_context`), and with it one I/O thread, and one `LoopBudget`; a link without a context has its own.
    `key` is a fleet key, or the transport keys of a frontend. Its sockets may be others than zmq's; what has to be
    random comes from the operating system, unless a simulation gives something else.
    """

    def __init__(
        self,
        address: str,
        *,
        key: Key | TransportKeys,
        frontend_id: str,
        limits: Limits | None = None,
        deadlines: Deadlines | None = None,
        backoff: Backoff | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        budget: LoopBudget | None = None,
        newest_only: bool = False,
        sockets: ClientSockets | None = None,
        random: Random = _SYSTEM,
    ) -> None:
        self.address = address
        self.newest_only = newest_only
        """True if only the newest keys are tried, however often they fail."""

        self._keys = transport_keys(key, "frontend")
        self._frontend_id = frontend_id
        self._limits = limits or Limits()
        self._deadlines = deadlines or Deadlines()
        self._retries = Retries(backoff or Backoff())
        self._code = "gone"
        """Why the last attempt or session ended."""

        self._sockets = sockets or ZmqClientSockets(self._limits, self._deadlines, context, budget)
        self._budget = budget
        self._random = random
        self.resume: Callable[[], Resume | None] = lambda: None
        """Returns the owner's state from earlier sessions."""

        self._attempt: _Attempt | None = None
        self._refused: SessionSocket | None = None
        """The socket of an attempt that was refused: when its connection ends, the worker is another one."""

        self._retry: asyncio.TimerHandle | None = None
        self._is_due = False

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._alarm = Alarm(self._on_time, self._budget)
        self._queue: EventQueue[Event | Connected] = EventQueue(
            max_events=_MAX_EVENTS, max_bytes=self._limits.max_feature_bytes, on_room=self._resume
        )
        try:
            self._connect()
        except BaseException:
            await self._sockets.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        self._let_go_of_refused()
        self._alarm.cancel()
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.session.close("the frontend closes")
            self._put_out(attempt)
            attempt.socket.close(LINGER_MS)
        self._queue.close()
        await self._sockets.close()

    def __aiter__(self) -> AsyncIterator[Event | Connected]:
        return self._queue

    def replace_keys(self, keys: TransportKeys) -> None:
        """Use other keys from the next attempt on. A session whose keys are not among them ends at once."""
        self._keys = transport_keys(keys, "frontend")
        self._retries.reset()
        if self._attempt is None and self._retry is not None:
            self._retry_after(0.0)
        if self._attempt is not None and not keys.accepts(self._attempt.generation):
            message = "the keys of this session are not accepted any more"
            self._tell(self._attempt.session.reset("key", message))
            self._flush_soon()
        self._code = "gone"  # the refusal of other keys means nothing any more

    def _connect(self) -> None:
        self._let_go_of_refused()
        generation = self._keys.attempt(self._retries.failures, newest_only=self.newest_only)
        handshake = FrontendHandshake(
            key=generation.link,
            frontend_id=self._frontend_id,
            nonce=self._random.randbytes(NONCE_BYTES),
            resume=self.resume(),
        )
        session = Session(handshake, now=self._loop.time(), limits=self._limits, deadlines=self._deadlines)
        socket = self._sockets.connect(self.address, generation, self._on_message, self._on_broken)
        self._attempt = _Attempt(generation, session, socket)
        self._send_all(self._attempt)

    def _on_message(self, frames: Frames) -> None:
        if self._attempt is not None:
            session = self._attempt.session
            self._tell(session.receive(frames, self._loop.time()))
            if session.is_due or session.next_deadline() < self._alarm.due:  # a token gives nothing to send
                self._flush_soon()

    def _on_broken(self, why: str) -> None:
        if self._refused is not None:
            self._let_go_of_refused()
            self._retries.reset()
            self._retry_after(self._retries.delay_s("gone", 1, self._random))
        if self._attempt is not None:
            self._attempt.socket.drain()  # the last messages arrived before the end
            self._tell(self._attempt.session.reset("gone", f"the connection to {self.address} broke: {why}"))
            if why == NO_KEYS_MATCH:
                self._code = NO_HANDSHAKE
            self._flush_soon()

    def _tell(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Opened) and self._attempt is not None:
                self._retries.reset()
                self._code = "gone"
                session = LinkSession(self._attempt.session, self._flush_soon, self._tell)
                number, incarnation = self._attempt.generation.number, event.incarnation
                self._queue.put(Connected(session, event.contract, number, incarnation), 0)
            else:
                if isinstance(event, Reset):
                    self._code = event.code
                self._queue.put(event, 0)  # features come to workers only
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
        self._attempt = None
        if self._code in _WATCHED:
            self._refused = attempt.socket
        else:
            attempt.socket.close(LINGER_MS)
        self._retry_later()

    def _retry_later(self) -> None:
        # Links that insist on the newest keys wait for their worker to get them: it is not refused for good.
        code = "gone" if self.newest_only else self._code
        self._retry_after(self._retries.delay_s(code, len(self._keys.generations), self._random))

    def _retry_after(self, delay_s: float) -> None:
        if self._retry is not None:
            self._retry.cancel()
        self._retry = self._loop.call_later(delay_s, self._reconnect)

    def _let_go_of_refused(self) -> None:
        refused, self._refused = self._refused, None
        if refused is not None:
            refused.close()

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
        if self._alarm.late_s > self._deadlines.heartbeat_s or self._attempt.socket.is_waiting:
            self._attempt.session.extend_deadline(now)
        self._tell(self._attempt.session.tick(now))
        self._send_all(self._attempt)
