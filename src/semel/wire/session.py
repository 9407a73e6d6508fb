"""A session between a frontend and a worker, without I/O: frames in, events out, and vice versa.

The rules: Every message carries epoch and sequence. A message that is not exactly the next one resets the session, and
so do unreadable data and a silent peer. Before both ends have proved that they have the key, only the handshake is
sent. Control messages are sent before bulk, and bulk only within the window that the peer's credit leaves, so an urgent
message waits behind at most one window. A session that has ended stays ended; the owner opens a new one.

The owner supplies the time: `now` is any clock in seconds that does not go back. Nothing here raises because of a peer:
a peer's error is a `Reset` among the events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, Literal

from semel.core import Digest, Feature
from semel.errors import ProtocolError
from semel.wire.codec import FROM_FRONTEND, FROM_WORKER, Buffer, Envelope, Frames, decode, encode, pack, size_of
from semel.wire.events import Closed, Event, Reset, Violation
from semel.wire.handshake import NO_EPOCH, Handshake
from semel.wire.limits import Deadlines, Limits
from semel.wire.liveness import Liveness
from semel.wire.messages import (
    Bye,
    Chunk,
    Credit,
    Delta,
    Deltas,
    Drain,
    Draining,
    FrontendMessage,
    Heartbeat,
    Message,
    Payload,
    Refusal,
    Status,
    Submit,
    ToFrontend,
    ToWorker,
    Withdraw,
    WorkerMessage,
)
from semel.wire.outputs import is_large
from semel.wire.transfer import Inbound, Outbound

__all__ = ["Session", "Traffic"]

_CLOSED: Final = "closed"
_MAX_DELTAS: Final = 256
_CREDITS_PER_WINDOW: Final = 4
_ROOMS_PER_LIMIT: Final = 2  # with half the limit unread, a peer that reads should have reported

_State = Literal["opening", "open", "ended"]
_ForOwner = ToWorker | ToFrontend


class Session:
    """One end of a session, from handshake to end."""

    def __init__(self, handshake: Handshake, *, now: float, limits: Limits, deadlines: Deadlines) -> None:
        self._handshake = handshake
        self._limits = limits
        self._state: _State = "opening"
        self._submits_over = False
        self._epoch = NO_EPOCH
        self._sequence_out = 0
        self._sequence_in = 0
        self._liveness = Liveness(deadlines, now)
        self._events: list[Event] = []
        self._queue: deque[tuple[int, bytes]] = deque()
        self._deltas: list[Delta] = []
        self._control = Traffic()
        self._bulk = Traffic()
        self._outbound = Outbound(limits)
        self._has_bulk = False
        self._inbound = Inbound(limits)
        if (first := handshake.first()) is not None:
            self._enqueue(first)

    @property
    def is_open(self) -> bool:
        """Return whether both ends have proved that they have the key and neither has ended the session."""
        return self._state == "open"

    @property
    def has_ended(self) -> bool:
        """Return whether the session has ended; `outgoing` then returns the last messages."""
        return self._state == "ended"

    @property
    def takes_submits(self) -> bool:
        """Return whether it is open and neither end is draining."""
        return self._state == "open" and not self._submits_over

    @property
    def has_room(self) -> bool:
        """Return whether one more control message is safe: a peer that reads stays below the limit of a stuck one."""
        control = self._control  # its numbers are read here: there is a call for each token
        unread = control.sent - control.acknowledged
        return self._state != "open" or unread <= self._limits.max_unread_bytes // _ROOMS_PER_LIMIT

    @property
    def is_due(self) -> bool:
        """Return whether there is more to do than to wait for `next_deadline`: to send, to tell, or to end."""
        return bool(self._queue or self._deltas or self._has_bulk or self._events) or self._state == "ended"

    @property
    def has_read_slices(self) -> bool:
        """Return whether one more slice of a snapshot may be sent: the peer has read those before, but for a few."""
        return not self.is_open or self._control.unread <= self._limits.max_unread_slice_bytes

    def send(self, message: ToWorker | ToFrontend) -> None:
        """Queue a control message. Deltas that are queued together are sent together."""
        if self._state != "open":
            raise _not_open()
        if isinstance(message, Delta):
            self._enqueue_delta(message)
            return
        if isinstance(message, Submit) and self._submits_over:
            raise ProtocolError(f"request {message.request_id} cannot be submitted: the session is draining")
        self._submits_over |= isinstance(message, Drain)
        if not isinstance(message, Status):
            self._liveness.has_acted = True
        self._enqueue(message)

    def send_packed(self, body: bytes) -> None:
        """Queue a status that was packed once for many sessions."""
        if self._state != "open":
            raise _not_open()
        self._enqueue_packed(body)

    def send_feature(self, digest: Digest, feature: Feature) -> int:
        """Queue a feature after all control messages. Returns the number of its transfer, for `withdraw`."""
        if self._state != "open":
            raise _not_open()
        self._liveness.has_acted = self._has_bulk = True
        return self._outbound.add(digest, feature)

    def withdraw(self, transfer: int) -> None:
        """Do not send the rest of a feature, if any: it is not needed."""
        if self.is_open and self._outbound.withdraw(transfer):
            self._enqueue(Withdraw(transfer))

    def close(self, message: str = "closed", *, code: str = _CLOSED) -> None:
        """Close the session: queued control messages are still sent, bulk is not. With another code it is a reset."""
        if self.is_open:
            self._enqueue(Bye(code, message))
            self._state = "ended"

    def reset(self, code: str, message: str) -> list[Event]:
        """End the session for a reason that the owner found, such as a broken connection."""
        return [] if self.has_ended else [*self._take_events(), self._end(code, message)]

    def receive(self, frames: Sequence[Buffer], now: float) -> list[Event]:
        """Process one message from the peer."""
        if self._state == "ended":
            return self._take_events()
        try:
            self._events += self._accept(self._decode(frames), now)
        except Violation as fault:
            self._events.append(self._end(fault.code, str(fault)))
        except ProtocolError as error:
            self._events.append(self._end("malformed", str(error)))
        return self._take_events()

    def tick(self, now: float) -> list[Event]:
        """Check the deadlines: an overdue peer ends the session."""
        if not self.has_ended and (fault := self._liveness.fault(now)) is not None:
            self._events.append(self._end("silence", fault))
        return self._take_events()

    def extend_deadline(self, now: float) -> None:
        """Let the peer be heard until the next heartbeat: this process has not read what it may have sent."""
        self._liveness.extend_deadline(now)

    def outgoing(self, now: float) -> list[Frames]:
        """The messages to send now, in order: control first, then as much bulk as the peer has room for."""
        if self._deltas:
            self._pack_deltas()
        is_open = self._state == "open"
        if is_open and self._liveness.takes_beat(now):
            self._enqueue(Heartbeat(self._control.report()))
            self._report_bulk(at_least=1)
        frames: list[Frames] = []
        while self._queue:
            frames.append(self._numbered(*self._queue.popleft()))
        if is_open and self._has_bulk:
            frames += self._bulk_frames()
            self._has_bulk = bool(self._outbound)
        return frames

    def next_deadline(self) -> float:
        """Return when to call `tick` and `outgoing` again if nothing happens before."""
        if self._events:
            return -inf
        return inf if self._state == "ended" else self._liveness.deadline

    def _decode(self, frames: Sequence[Buffer]) -> Envelope[FrontendMessage] | Envelope[WorkerMessage]:
        # Before its proof, a peer may use no more of this process's time than a handshake takes.
        if self._epoch == NO_EPOCH and (nbytes := sum(map(len, frames))) > self._limits.max_handshake_bytes:
            raise Violation("handshake", f"{nbytes:,} bytes came before the session was open")
        if self._handshake.role == "worker":
            return decode(frames, FROM_FRONTEND, self._limits)
        return decode(frames, FROM_WORKER, self._limits)

    def _accept(self, envelope: Envelope[FrontendMessage] | Envelope[WorkerMessage], now: float) -> list[Event]:
        message = envelope.message
        if isinstance(message, Refusal):
            # Accepted with any number: a restarted worker knows none of this frontend's sessions.
            raise Violation(message.code, message.message)
        if envelope.epoch != self._epoch:
            raise Violation("session", f"{type(message).__name__} is of another session")
        if envelope.sequence != self._sequence_in:
            raise Violation("sequence", f"message {envelope.sequence} came when {self._sequence_in} was due")
        self._sequence_in += 1
        self._liveness.hear(now, is_activity=not isinstance(message, Heartbeat | Status))
        if isinstance(message, Payload | Chunk):
            return self._accept_bulk(message, envelope)
        control = self._control
        control.read += envelope.nbytes
        if self._state != "open":
            return self._shake_hands(message, now)
        # The first, so that only a peer that does not read is overrun; the next slice of a status waits for the second.
        is_much = control.read - control.reported >= self._limits.max_unread_bytes // _CREDITS_PER_WINDOW
        if is_much or (isinstance(message, Status) and message.more):
            self._enqueue(Heartbeat(control.report()))
        return list(message.deltas) if isinstance(message, Deltas) else self._accept_control(message)

    def _accept_control(self, message: Message) -> list[Event]:
        match message:
            case Heartbeat(read=read):
                self._control.acknowledge(read)
            case Credit(read=read):
                self._bulk.acknowledge(read)
            case Withdraw(transfer=transfer):
                self._inbound.withdraw(transfer)
            case Bye():
                return [self._part(message)]
            case Submit() if self._submits_over:
                raise Violation("order", f"request {message.request_id} came after the frontend began to drain")
            case _ if isinstance(message, _ForOwner):
                self._submits_over |= isinstance(message, Drain | Draining)
                return [message]
            case _:
                raise Violation("order", f"{type(message).__name__} came into an open session")
        return []

    def _accept_bulk(
        self, message: Payload | Chunk, envelope: Envelope[FrontendMessage] | Envelope[WorkerMessage]
    ) -> list[Event]:
        if not self.is_open:
            raise Violation("handshake", f"{type(message).__name__} came before the session was open")
        if isinstance(message, Payload):
            arrived = self._inbound.begin(message, envelope.buffers)
        else:
            arrived = self._inbound.extend(message, envelope.buffers[0])
        self._bulk.read += envelope.nbytes
        self._report_bulk(at_least=self._limits.window_bytes // _CREDITS_PER_WINDOW)
        return [] if arrived is None else [arrived]

    def _shake_hands(self, message: Message, now: float) -> list[Event]:
        step = self._handshake.receive(message)
        if step.opened is None and step.reply is not None:
            self._enqueue(step.reply)  # without the epoch: the peer learns it from this reply
        self._epoch = step.epoch
        if step.opened is None:
            return []
        self._state = "open"
        self._liveness.open(now)
        if step.reply is not None:
            self._enqueue(step.reply)
        return [step.opened]

    def _part(self, bye: Bye) -> Closed | Reset:
        """Process the peer's last message; there is no reply."""
        self._state = "ended"
        self._forget()
        return Closed(bye.message) if bye.code == _CLOSED else Reset(bye.code, f"the peer says: {bye.message}")

    def _end(self, code: str, message: str) -> Reset:
        """End the session from this side, and report the reason if the peer can understand it."""
        last: Message | None = None
        if self.is_open:
            last = Bye(code, message)
        elif self._handshake.role == "worker":
            last = Refusal(code, message)
        self._state = "ended"
        self._forget()
        if last is not None:
            self._queue.append((self._epoch, pack(last, self._limits)))
        return Reset(code, message)

    def _forget(self) -> None:
        self._queue.clear()
        self._deltas.clear()
        self._outbound = Outbound(self._limits)
        self._has_bulk = False
        self._inbound = Inbound(self._limits)

    def _enqueue_delta(self, delta: Delta) -> None:
        """Collect small deltas: sent together they cost 2 µs each at either end, one by one 17."""
        self._liveness.has_acted = True
        if is_large(delta):
            self._enqueue(Deltas((delta,)))
            return
        self._deltas.append(delta)
        if len(self._deltas) >= _MAX_DELTAS:
            self._pack_deltas()

    def _enqueue(self, message: Message) -> None:
        self._enqueue_packed(pack(message, self._limits))

    def _enqueue_packed(self, body: bytes) -> None:
        if self._deltas:
            self._pack_deltas()
        if self._state == "ended":
            return
        control = self._control
        control.sent += size_of(body)
        self._queue.append((self._epoch, body))
        if control.sent - control.acknowledged > self._limits.max_unread_bytes:
            self._events.append(self._end("overrun", f"the peer has left {control.unread:,} bytes unread"))

    def _pack_deltas(self) -> None:
        deltas, self._deltas = tuple(self._deltas), []
        self._enqueue(Deltas(deltas))

    def _report_bulk(self, *, at_least: int) -> None:
        if self._bulk.unreported >= at_least:
            self._enqueue(Credit(self._bulk.report()))

    def _bulk_frames(self) -> Iterator[Frames]:
        while True:
            # A piece that is larger than the window may be sent when nothing else is in transit.
            room = self._limits.window_bytes - self._bulk.unread if self._bulk.unread else self._limits.max_open_bytes
            if (piece := self._outbound.take(room)) is None:
                return
            frames = self._numbered(self._epoch, piece.body, piece.buffers)
            self._bulk.sent += sum(map(len, frames))
            yield frames

    def _numbered(self, epoch: int, body: bytes, buffers: Sequence[memoryview] = ()) -> Frames:
        frames = encode(epoch, self._sequence_out, body, buffers)
        self._sequence_out += 1
        return frames

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events


def _not_open() -> ProtocolError:
    return ProtocolError("the session is not open; send when it is, or to another worker")


@dataclass(slots=True)
class Traffic:
    """Totals since the session began. Totals need no order and no repair: the last one received is correct."""

    sent: int = 0
    acknowledged: int = 0
    """Sent bytes that the peer has reported as read."""

    read: int = 0
    reported: int = 0
    """Read bytes that were reported to the peer."""

    @property
    def unread(self) -> int:
        """Bytes in transit, as far as this end knows."""
        return self.sent - self.acknowledged

    @property
    def unreported(self) -> int:
        """Read bytes that were not yet reported to the peer."""
        return self.read - self.reported

    def acknowledge(self, total: int) -> None:
        """Note that the peer has read this total."""
        if not self.acknowledged <= total <= self.sent:
            raise Violation("order", f"the peer claims to have read {total:,} bytes of {self.sent:,} sent")
        self.acknowledged = total

    def report(self) -> int:
        """Return the total to report to the peer."""
        self.reported = self.read
        return self.read
