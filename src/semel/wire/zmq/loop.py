"""The event loop of zmq sockets and sessions: reading, one timer, a bounded event queue. No tasks.

Callbacks replace tasks: a message costs no wake-up of its own, messages of one loop iteration are sent together, and
there is nothing to cancel on close.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from math import inf
from time import perf_counter
from typing import Final, Generic, TypeVar

import zmq

from semel.wire.codec import MAX_FRAMES, Buffer, Frames
from semel.wire.events import Arrived, Event
from semel.wire.limits import Deadlines, Limits

__all__ = ["LINGER_MS", "Alarm", "EventQueue", "LoopBudget", "LoopSocket", "configure", "end", "link_context", "weight"]

LINGER_MS: Final = 1000
"""Time that a properly closed socket has for its last messages."""

_TERM_S: Final = 5.0
_MAX_SOCKETS: Final = 16_384
"""A link takes three: its own, its monitor and zmq's end of that. zmq's default of 1,023 is enough for 341 links."""

_SEND: Final = int(zmq.DONTWAIT)
_SEND_MORE: Final = int(zmq.DONTWAIT | zmq.SNDMORE)
"""As numbers: pyzmq's flags take longer to join than a small message to send."""

_BATCH: Final = 32
"""Messages to read before other callbacks run."""

_T = TypeVar("_T")


class LoopBudget:
    """The time that many links together may take in one iteration of the loop. Those that have to wait take turns.

    What is read wakes its readers, who may take several times as long as reading: a thousand workers that announce all
    they hold at once would keep the loop for seconds. Their heartbeats fall due together too: 50 ms for 400 of them.
    """

    def __init__(self, max_s: float = 0.002, now: Callable[[], float] = perf_counter) -> None:
        self._max_s = max_s
        self._now = now
        self._loop = asyncio.get_running_loop()
        self._until: float | None = None
        self._waiting: deque[Callable[[], None]] = deque()

    @property
    def is_contended(self) -> bool:
        """Return whether others wait: a socket then reads one message and goes to the end of the line."""
        return bool(self._waiting)

    def has_time(self) -> bool:
        """Return whether one more message may be read, or one more alarm be heard, in this iteration."""
        if self._until is None:
            self._until = self._now() + self._max_s
            self._loop.call_soon(self._renew)
            return True
        return self._now() < self._until

    def wait(self, turn: Callable[[], None]) -> None:
        """Call when there is time again, after those who wait already."""
        self._waiting.append(turn)

    def _renew(self) -> None:
        self._until = None
        for _ in range(len(self._waiting)):
            if not self.has_time():
                return
            self._waiting.popleft()()


class LoopSocket:
    """A zmq socket that calls `on_message` for each message, and sends at once or not at all."""

    def __init__(
        self, socket: zmq.Socket[bytes], on_message: Callable[[Frames], None], budget: LoopBudget | None = None
    ) -> None:
        self._socket = socket
        self._budget = budget
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._scheduled = self._closed = False
        self.is_paused = self.is_waiting = False
        self._descriptor: int = socket.FD
        self._is_watched = False
        self._watch()
        self._schedule()

    def send(self, frames: Sequence[Buffer]) -> None:
        """Send a message; buffers over 64 KB are not copied, which saves 0.26 s of this thread for 256 MB."""
        copy = not isinstance(frames[-1], memoryview)
        for frame in frames[:-1]:
            self._socket.send(frame, _SEND_MORE, copy=copy)
        self._socket.send(frames[-1], _SEND, copy=copy)
        # Sending may consume the signal of an incoming message, so check for one.
        self._schedule()

    def pause(self) -> None:
        """Stop reading; the peers' windows fill and they wait."""
        self.is_paused = True

    def resume(self) -> None:
        """Continue reading."""
        if self.is_paused:
            self.is_paused = False
            self._schedule()

    def drain(self) -> None:
        """Read all available messages now: the connection is broken, and no more will come."""
        while not self._closed and (frames := self._receive()) is not None:
            self._on_message(frames)

    def close(self, linger_ms: int = 0) -> None:
        """Close it; messages not sent within the time are lost."""
        if not self._closed:
            self._closed = True
            self._unwatch()
            self._socket.disable_monitor()
            self._socket.close(linger_ms)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._read)

    def _watch(self) -> None:
        if not self._is_watched and not self._closed:
            self._is_watched = True
            self._loop.add_reader(self._descriptor, self._read)

    def _unwatch(self) -> None:
        if self._is_watched:
            self._is_watched = False
            self._loop.remove_reader(self._descriptor)

    def _take_turn(self) -> None:
        self.is_waiting = False
        try:
            self._read()
        finally:
            if not self.is_waiting:
                self._watch()

    def _read(self) -> None:
        if self.is_waiting:
            return  # its turn comes
        self._scheduled = False
        budget = self._budget
        for count in range(_BATCH):
            if budget is not None and (not budget.has_time() or (count and budget.is_contended)):
                self._scheduled = self.is_waiting = True
                self._unwatch()  # or the loop would tell of it in every iteration
                budget.wait(self._take_turn)
                return
            if self.is_paused or self._closed or (frames := self._receive()) is None:
                return
            self._on_message(frames)
        self._schedule()

    def _receive(self) -> Frames | None:
        """Return one message, or enough of it to show that it has too many frames."""
        frames: Frames = []
        more = True
        while more:
            try:
                frame = self._socket.recv(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return None
            more = frame.more
            if len(frames) <= MAX_FRAMES + 1:
                frames.append(frame.buffer)
        return frames


class Alarm:
    """One timer, which is only ever brought forward: firing too early costs nothing."""

    def __init__(self, ring: Callable[[], None], budget: LoopBudget | None = None) -> None:
        self._ring = ring
        self._budget = budget
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None
        self.due = inf
        """The loop time at which it fires."""

        self.late_s = 0.0
        """Its delay the last time it fired: so long the loop did nothing else, nor read what has come."""

    def set(self, when: float) -> None:
        """Fire at this loop time or earlier."""
        if when < self.due:
            self.cancel()
            self.due = max(when, self._loop.time())
            self._handle = self._loop.call_at(self.due, self._go_off)

    def cancel(self) -> None:
        """Do not fire."""
        if self._handle is not None:
            self._handle.cancel()
        self._handle, self.due = None, inf

    def _go_off(self) -> None:
        if self.due == inf:
            return  # cancelled while it waited
        if self._budget is not None and not self._budget.has_time():
            self._budget.wait(self._go_off)
            return
        self.late_s = self._loop.time() - self.due
        self._handle, self.due = None, inf
        self._ring()


class EventQueue(Generic[_T]):
    """Events for one reader. `put` never waits; the caller must stop when the queue is full."""

    def __init__(self, *, max_events: int, max_bytes: int, on_room: Callable[[], None]) -> None:
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._on_room = on_room
        self._events: deque[tuple[_T, int]] = deque()
        self._bytes = 0
        self._closed = self._was_full = False
        self._changed = asyncio.Event()

    @property
    def is_full(self) -> bool:
        """Return whether the caller must stop reading. After that, `on_room` is called when there is room again."""
        is_full = len(self._events) >= self._max_events or self._bytes >= self._max_bytes
        self._was_full |= is_full
        return is_full

    def put(self, event: _T, nbytes: int) -> None:
        """Add an event that uses this many bytes of memory."""
        self._events.append((event, nbytes))
        self._bytes += nbytes
        self._changed.set()

    def close(self) -> None:
        """End the reader's iteration after the queued events."""
        self._closed = True
        self._changed.set()

    def __aiter__(self) -> EventQueue[_T]:
        return self

    async def __anext__(self) -> _T:
        # No deadline here: every session has one, and its end is an event.
        while not self._events:
            if self._closed:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        event, nbytes = self._events.popleft()
        self._bytes -= nbytes
        if self._was_full and not self.is_full:
            self._was_full = False
            self._on_room()
        return event


def weight(event: Event) -> int:
    """Approximate memory of an event in bytes."""
    return event.feature.nbytes if isinstance(event, Arrived) else 0


def configure(socket: zmq.Socket[bytes], limits: Limits, deadlines: Deadlines) -> None:
    """Options common to all sockets: nothing lingers, nothing is dropped, frames have a size limit.

    zmq's own heartbeats go from I/O thread to I/O thread: they end the connection to a process that is stopped or a
    host that is gone, and not that to an event loop which is busy for a while.
    """
    socket.heartbeat_ivl = round(deadlines.ping_s * 1000)
    socket.heartbeat_timeout = socket.heartbeat_ttl = round(deadlines.connection_s * 1000)
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = 0
    socket.maxmsgsize = limits.max_frame_bytes


@asynccontextmanager
async def link_context() -> AsyncIterator[zmq.Context[zmq.Socket[bytes]]]:
    """A context for all links of a process: one I/O thread, however many there are."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
    try:
        yield context
    finally:
        await end(context)


async def end(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """End a context whose sockets are closed; waits in a thread while they linger."""
    await asyncio.wait_for(asyncio.to_thread(context.term), _TERM_S)
