"""What zmq sockets and sessions need of an asyncio event loop: reading, one timer, a bounded queue of events. No tasks.

Callbacks instead of tasks: a message costs no wake-up of its own, what is sent in one turn of the loop goes out
together, and there is nothing to cancel on close.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Final, Generic, TypeVar

import zmq

from semel.wire.codec import MAX_FRAMES, Buffer, Frames
from semel.wire.events import Arrived, Event
from semel.wire.limits import Limits

__all__ = ["LINGER_MS", "Alarm", "EventQueue", "LoopSocket", "configure", "end", "weight"]

LINGER_MS: Final = 1000
"""How long a socket that is closed in good order may take to send its last word."""

_TERM_S: Final = 5.0

_BATCH: Final = 32
"""Messages that are read before others have their turn."""

_T = TypeVar("_T")


class LoopSocket:
    """A zmq socket that calls `on_message` for each message, and sends at once or not at all."""

    def __init__(self, socket: zmq.Socket[bytes], on_message: Callable[[Frames], None]) -> None:
        self._socket = socket
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._scheduled = self._closed = False
        self.is_paused = False
        self._descriptor: int = socket.FD
        self._loop.add_reader(self._descriptor, self._read)
        self._schedule()

    def send(self, frames: Sequence[Buffer]) -> None:
        """Send a message; buffers over 64 KB are not copied, which for 256 MB saves 0.26 s of this thread."""
        self._socket.send_multipart(frames, zmq.DONTWAIT, copy=not isinstance(frames[-1], memoryview))
        # Sending may swallow the signal that something came, so look.
        self._schedule()

    def pause(self) -> None:
        """Read no more; the peers' windows fill and they wait."""
        self.is_paused = True

    def resume(self) -> None:
        """Read on."""
        if self.is_paused:
            self.is_paused = False
            self._schedule()

    def drain(self) -> None:
        """Read all that is there, now: the connection has broken, and more will not come."""
        while not self._closed and (frames := self._receive()) is not None:
            self._on_message(frames)

    def close(self, linger_ms: int = 0) -> None:
        """Close it; what it has not sent within the time is lost."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._descriptor)
            self._socket.disable_monitor()
            self._socket.close(linger_ms)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._scheduled = False
        for _ in range(_BATCH):
            if self.is_paused or self._closed or (frames := self._receive()) is None:
                return
            self._on_message(frames)
        self._schedule()

    def _receive(self) -> Frames | None:
        """One message, or as much of it as shows that it has too many frames."""
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
    """One timer, which is only ever brought forward: ringing too early costs nothing."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None
        self._due = inf

    def set(self, when: float) -> None:
        """Ring at this time of the loop, or before."""
        if when < self._due:
            self.cancel()
            self._due = when
            self._handle = self._loop.call_at(max(when, self._loop.time()), self._go_off)

    def cancel(self) -> None:
        """Do not ring."""
        if self._handle is not None:
            self._handle.cancel()
        self._handle, self._due = None, inf

    def _go_off(self) -> None:
        self._handle, self._due = None, inf
        self._ring()


class EventQueue(Generic[_T]):
    """Events for one reader. `put` never waits; who puts must stop when it is full."""

    def __init__(self, *, max_events: int, max_bytes: int, on_room: Callable[[], None]) -> None:
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._on_room = on_room
        self._events: deque[tuple[_T, int]] = deque()
        self._bytes = 0
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def is_full(self) -> bool:
        """Whether to stop reading."""
        return len(self._events) >= self._max_events or self._bytes >= self._max_bytes

    def put(self, event: _T, nbytes: int) -> None:
        """Add an event that holds so many bytes of memory."""
        self._events.append((event, nbytes))
        self._bytes += nbytes
        self._changed.set()

    def close(self) -> None:
        """End the reader's iteration, once it has read what is there."""
        self._closed = True
        self._changed.set()

    def __aiter__(self) -> EventQueue[_T]:
        return self

    async def __anext__(self) -> _T:
        # No deadline of its own: every session has one, and what it ends with is an event.
        while not self._events:
            if self._closed:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        was_full = self.is_full
        event, nbytes = self._events.popleft()
        self._bytes -= nbytes
        if was_full and not self.is_full:
            self._on_room()
        return event


def weight(event: Event) -> int:
    """The bytes of memory that an event holds, as far as they matter."""
    return event.feature.nbytes if isinstance(event, Arrived) else 0


def configure(socket: zmq.Socket[bytes], limits: Limits) -> None:
    """What all our sockets have in common: nothing lingers, nothing is dropped, no frame is larger than it may be."""
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = 0
    socket.maxmsgsize = limits.max_frame_bytes


async def end(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """End a context whose sockets are closed; it waits for them to linger, in a thread."""
    await asyncio.wait_for(asyncio.to_thread(context.term), _TERM_S)
