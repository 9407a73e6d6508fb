"""The worker's side: one session for each frontend, over one ROUTER for each generation of keys.

At an `ipc://` address, where no key is in the socket, one ROUTER takes all generations."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from random import Random, SystemRandom
from types import TracebackType
from typing import Final, Self

import zmq

from semel.core import Contract, Key
from semel.errors import ConfigError
from semel.wire.codec import Frames, encode, pack
from semel.wire.events import Admitted, Closed, Event, Reset
from semel.wire.handshake import NO_EPOCH, WorkerHandshake
from semel.wire.keys import Generation, TransportKeys
from semel.wire.limits import Deadlines, Limits
from semel.wire.liveness import Timers
from semel.wire.messages import INCARNATION_BYTES, NONCE_BYTES, Refusal, Status, ToFrontend
from semel.wire.session import Session
from semel.wire.zmq.address import transport_keys
from semel.wire.zmq.loop import LINGER_MS, Alarm, EventQueue, weight
from semel.wire.zmq.sockets import ServerSockets, SessionSocket, ZmqServerSockets

__all__ = ["LogLimit", "Peer", "WorkerListener"]

_log = logging.getLogger(__name__)

_MAX_PEERS: Final = 4096
_MAX_EVENTS: Final = 4096
_WARNING_S: Final = 1.0
"""Between two lines about refused frontends, for each reason."""

_RINGS: Final = 50
"""Rings in the time of a heartbeat, at the most. With a thousand sessions, a ring for each is a tenth of the work."""

_LAZY_S: Final = 0.01
"""Seconds that a lazy message waits for another one."""

_ANY: Final = ""
"""The id of a socket that takes all generations."""

_SYSTEM: Final = SystemRandom()

_Identity = tuple[str, bytes]
"""Of a session: the id of its socket, and the name that the frontend has there."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A frontend in one session: after a reset the same frontend is another peer."""

    frontend_id: str
    identity: _Identity = field(repr=False)
    generation: int = field(default=0, compare=False)
    """Of the keys that it was admitted with."""


class WorkerListener:
    """Accepts frontends at one address. Iteration yields `(peer, event)`; an admitted peer ends with Closed or Reset.

    Frontends that never prove that they have the key produce no events; they are counted in `refused` and logged.
    `key` is a fleet key, or the transport keys of a worker, which can be replaced while it listens. `sockets` and
    `random` are for simulations: its sockets are zmq's, and what has to be random comes from the operating system.
    """

    def __init__(
        self,
        address: str,
        *,
        key: Key | TransportKeys,
        contract: Contract,
        limits: Limits | None = None,
        deadlines: Deadlines | None = None,
        max_peers: int = _MAX_PEERS,
        sockets: Callable[[], ServerSockets] | None = None,
        random: Random = _SYSTEM,
    ) -> None:
        self.address = address
        """The address; once open, with the actual port in place of a `*`."""

        self.refused: Counter[str] = Counter()
        """Frontends that got no session, by the reason's code."""

        self._max_peers = max_peers
        self._warnings = LogLimit(_WARNING_S)
        self._keys = transport_keys(key, "worker")
        self.contract = contract
        """The one that frontends get which connect from now on."""

        self._limits = limits or Limits()
        self._deadlines = deadlines or Deadlines()
        self._random = random
        self.incarnation = random.randbytes(INCARNATION_BYTES)
        """Of this process, for frontends that come back."""

        self._open = sockets or (lambda: ZmqServerSockets(self._limits, self._deadlines, lambda: self._keys))
        self._sockets: dict[str, SessionSocket] = {}
        """By the id of the generation that each takes."""

        self._sessions: dict[_Identity, Session] = {}
        self._peers: dict[_Identity, Peer] = {}
        self._key_ids: dict[_Identity, str] = {}
        """The keys that admitted sessions were opened with."""

        self._timers: Timers[_Identity] = Timers()
        """The times at which sessions have to beat, or are given up on."""

        self._due: dict[_Identity, None] = {}
        """Sessions with messages to send, in order."""

        self._lazy: dict[_Identity, asyncio.TimerHandle] = {}
        """Of sessions whose messages wait for the next one."""

        self._rooms: dict[_Identity, asyncio.Event] = {}
        """By session, the event for callers that wait to queue more."""

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._opener = self._open()
        try:
            for generation in self._bound_generations(self._keys):
                self._bind(generation)
        except BaseException:
            for opened in self._sockets.values():
                opened.close()
            await self._opener.close(at_once=True)
            raise
        self._alarm = Alarm(self._on_time)
        self._queue: EventQueue[tuple[Peer, Event]] = EventQueue(
            max_events=_MAX_EVENTS, max_bytes=self._limits.max_feature_bytes, on_room=self._resume
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for session in self._sessions.values():
            session.close("the worker closes")
        self._due.update(dict.fromkeys(self._sessions))
        self._flush()
        self._alarm.cancel()
        self._opener.remove_file()
        for socket in self._sockets.values():
            socket.close(LINGER_MS)
        self._queue.close()
        await self._opener.close()

    def __aiter__(self) -> AsyncIterator[tuple[Peer, Event]]:
        return self._queue

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The admitted frontends."""
        return tuple(self._peers.values())

    @property
    def generations(self) -> Mapping[int, int]:
        """Return how many frontends are here with the keys of each generation that is accepted."""
        found = Counter(peer.generation for peer in self.peers)
        return {one.number: found[one.number] for one in self._keys.generations}

    def replace_keys(self, keys: TransportKeys) -> None:
        """Take other keys from now on. Sessions go on whose generation stays; the others end with the reason.

        A `ConfigError` if it cannot listen with them; then nothing has changed.
        """
        if transport_keys(keys, "worker") == self._keys:
            return
        before, wanted = set(self._sockets), [one.link.id for one in self._bound_generations(keys)]
        try:
            for generation in self._bound_generations(keys):
                if generation.link.id not in self._sockets and _ANY not in self._sockets:
                    self._bind(generation)
        except ConfigError:
            for added in set(self._sockets) - before:
                self._sockets.pop(added).close()
            raise
        self._keys = keys
        self._end_retired()
        for retired in before - {*wanted, _ANY}:
            self._sockets.pop(retired).close(LINGER_MS)

    def send(self, peer: Peer, message: ToFrontend) -> None:
        """Queue a message. A message to a disconnected peer is dropped: the peer's end is among the events."""
        session = self._sessions.get(peer.identity)
        if session is not None and session.is_open:
            session.send(message)
            self._flush_soon(peer.identity)

    def send_lazily(self, peer: Peer, message: ToFrontend) -> None:
        """Queue a message that may wait for the next one, which saves three wake-ups; alone it is sent after 10 ms."""
        session = self._sessions.get(peer.identity)
        if session is not None and session.is_open:
            session.send(message)
            if peer.identity not in self._due and peer.identity not in self._lazy:
                self._lazy[peer.identity] = self._loop.call_later(_LAZY_S, self._flush_soon, peer.identity)

    async def until_room(self, peer: Peer) -> None:
        """Wait until a peer has read enough to receive more; returns at once for a disconnected peer."""
        # No deadline here: a peer that does not read is silent, and that ends its session.
        while (session := self._sessions.get(peer.identity)) is not None and not session.has_room:
            await self._rooms.setdefault(peer.identity, asyncio.Event()).wait()

    def send_all(self, peers: Iterable[Peer], status: Status) -> None:
        """Queue a status for many peers: it is packed once."""
        body = pack(status, self._limits)
        for peer in peers:
            session = self._sessions.get(peer.identity)
            if session is not None and session.is_open:
                session.send_packed(body)
                self._flush_soon(peer.identity)

    async def until_read(self, peer: Peer) -> None:
        """Wait until a peer has read enough of a snapshot to get one more slice; at once for a disconnected peer."""
        # No deadline here: a peer that does not read is silent, and that ends its session.
        while (session := self._sessions.get(peer.identity)) is not None and not session.has_read_slices:
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

    def _bound_generations(self, keys: TransportKeys) -> tuple[Generation, ...]:
        """Return those that need a socket of their own."""
        return keys.generations if self.address.startswith("tcp://") else keys.generations[-1:]

    def _bind(self, generation: Generation) -> None:
        """Listen for frontends of a generation, and at an `ipc://` address of all of them."""
        door = generation.link.id if self.address.startswith("tcp://") else _ANY
        self.address, self._sockets[door] = self._opener.bind(
            self.address, generation, partial(self._on_message, door), beside_another=bool(self._sockets)
        )

    def _end_retired(self) -> None:
        """End the sessions whose keys are not accepted any more."""
        accepted = {one.link.id for one in self._keys.generations}
        retired = [identity for identity in self._sessions if self._key_ids.get(identity, identity[0]) not in accepted]
        for identity in retired:
            message = "the keys of this session are not accepted any more"
            self._tell(identity, self._sessions[identity].reset("key", message))
        self._due.update(dict.fromkeys(retired))
        self._flush()

    def _resume(self) -> None:
        for socket in self._sockets.values():
            socket.resume()

    def _on_message(self, door: str, frames: Frames) -> None:
        identity = door, bytes(frames[0])
        session = self._sessions.get(identity)
        if session is None:
            if len(self._sessions) >= self._max_peers:
                self._turn_away(identity)
                return
            self._sessions[identity] = session = self._new_session(door)
        self._tell(identity, session.receive(frames[1:], self._loop.time()))
        self._let_in(identity, session)
        self._flush_soon(identity)

    def _new_session(self, door: str) -> Session:
        handshake = WorkerHandshake(
            keys=[one.link for one in self._keys.generations if door in {_ANY, one.link.id}],
            contract=self.contract,
            nonce=self._random.randbytes(NONCE_BYTES),
            incarnation=self.incarnation,
        )
        return Session(handshake, now=self._loop.time(), limits=self._limits, deadlines=self._deadlines)

    def _tell(self, identity: _Identity, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Admitted):
                self._peers[identity] = self._admit(identity, event)
            ends = isinstance(event, Closed | Reset)
            if (peer := self._peers.pop(identity, None) if ends else self._peers.get(identity)) is not None:
                self._queue.put((peer, event), weight(event))
            elif isinstance(event, Reset):
                self._note_refusal(event.code, event.message)
        if self._queue.is_full:
            for socket in self._sockets.values():
                socket.pause()

    def _turn_away(self, identity: _Identity) -> None:
        """Say why there is no session, to a frontend that is one too many. Nothing is kept of it."""
        message = f"the worker has {len(self._sessions):,} frontends, as many as it takes (--max-frontends)"
        self._note_refusal("busy", message)
        with suppress(zmq.ZMQError):  # it may have gone already
            refusal = encode(NO_EPOCH, 0, pack(Refusal("busy", message), self._limits))
            self._sockets[identity[0]].send([identity[1], *refusal])

    def _note_refusal(self, code: str, message: str) -> None:
        self.refused[code] += 1
        if (unsaid := self._warnings.take(code, self._loop.time())) is not None:
            more = f"; {unsaid} more since the last such line" if unsaid else ""
            # A frontend that waits for its worker to start has left its first attempts behind.
            level = logging.INFO if code == "gone" else logging.WARNING
            _log.log(level, "refused a frontend at %s (%s): %s%s", self.address, code, message, more)

    def _admit(self, identity: _Identity, event: Admitted) -> Peer:
        generation = self._keys.get(event.key_id)
        assert generation is not None  # a session has only keys that are accepted, and ends with them
        self._key_ids[identity] = event.key_id
        return Peer(event.frontend_id, identity, generation.number)

    def _let_in(self, identity: _Identity, session: Session) -> None:
        """Wake the callers that wait for room, if there is room."""
        if identity in self._rooms and session.has_room:  # some of them wait for more, and look again
            self._rooms.pop(identity).set()

    def _flush_soon(self, identity: _Identity) -> None:
        if not self._due:
            self._loop.call_soon(self._flush)
        self._due[identity] = None

    def _flush(self) -> None:
        """Send due messages, and remove the sessions that ended with them."""
        due, self._due = self._due, {}
        for identity in due:
            if (timer := self._lazy.pop(identity, None)) is not None:
                timer.cancel()
            if (session := self._sessions.get(identity)) is None:
                continue
            try:
                for frames in session.outgoing(self._loop.time()):
                    self._sockets[identity[0]].send([identity[1], *frames])
            except zmq.ZMQError as error:
                self._tell(identity, session.reset("gone", f"the frontend is gone: {error.strerror}"))
            if session.has_ended:
                self._tell(identity, session.tick(self._loop.time()))
                del self._sessions[identity]
                self._timers.discard(identity)
                self._key_ids.pop(identity, None)
                self._peers.pop(identity, None)  # this side ended the session
                self._let_in(identity, session)
            else:
                self._timers.set(identity, session.next_deadline())
        self._set_alarm()

    def _set_alarm(self) -> None:
        """Ring for the next session that is due, and a little later: one ring serves all that are due by then."""
        if (due := self._timers.next) < inf:
            self._alarm.set(due + self._deadlines.heartbeat_s / _RINGS)

    def _on_time(self) -> None:
        now = self._loop.time()
        if any(socket.is_paused for socket in self._sockets.values()):
            # This process does not read, so the silence is not the peer's fault.
            self._alarm.set(now + self._deadlines.heartbeat_s)
            return
        if self._alarm.late_s > self._deadlines.heartbeat_s:
            for session in self._sessions.values():
                session.extend_deadline(now)
        for identity in self._timers.pop_due(now):
            self._tell(identity, self._sessions[identity].tick(now))
            self._due[identity] = None
        self._flush()


class LogLimit:
    """At most one line in a time, for each kind of line. Kinds are few and known."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._last: dict[str, float] = {}
        self._unsaid: dict[str, int] = {}

    def take(self, kind: str, now: float) -> int | None:
        """The number of lines that were not written since the last one, if one may be written now; None if not."""
        if kind in self._last and now < self._last[kind] + self._every_s:
            self._unsaid[kind] = self._unsaid.get(kind, 0) + 1
            return None
        self._last[kind] = now
        return self._unsaid.pop(kind, 0)
