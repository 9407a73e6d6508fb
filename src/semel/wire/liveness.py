"""Heartbeats of a session and the deadline for the peer's; and timers. Pure, the time is passed in.

While something goes on in a session, both ends beat once a second: a message that is lost, and a frontend that is gone,
are noticed with the next beat. A session in which nothing goes on beats ten times more seldom; a worker that tells how
busy it is does not count as something. So a thousand idle sessions take little of a worker's time.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import Final, Generic, TypeVar

from semel.wire.limits import Deadlines

__all__ = ["Liveness", "Timers"]


class Liveness:
    """The times of one end of a session."""

    def __init__(self, deadlines: Deadlines, now: float) -> None:
        self._deadlines = deadlines
        self._began = self._heard = self._beat = self._active = now
        self._is_open = False
        self.has_acted = False
        """True if something was sent that is more than a sign of life; its sender sets it."""

    def open(self, now: float) -> None:
        """Both ends have proved that they have the key."""
        self._is_open = True
        self._heard = self._active = now
        self._beat = now + self._deadlines.heartbeat_s

    def hear(self, now: float, *, is_activity: bool) -> None:
        """Note a message, which may be more than a sign of life."""
        self._heard = now
        if is_activity:
            self._note_activity(now)

    def extend_deadline(self, now: float) -> None:
        """Let the peer be heard until the next heartbeat: this process has not read what it may have sent."""
        grace_s = self._deadlines.heartbeat_s
        self._heard = max(self._heard, now + grace_s - self._deadlines.silence_s)
        self._began = max(self._began, now + grace_s - self._deadlines.handshake_s)

    def takes_beat(self, now: float) -> bool:
        """Return whether a heartbeat is due; then the next one is due later."""
        if self.has_acted:
            self._note_activity(now)
        if now < self._beat:
            return False
        is_idle = now >= self._active + self._deadlines.active_s
        self._beat = now + (self._deadlines.idle_heartbeat_s if is_idle else self._deadlines.heartbeat_s)
        return True

    def fault(self, now: float) -> str | None:
        """Return why the peer is given up on, if it is."""
        if now < self._patience:
            return None
        if self._is_open:
            return f"nothing heard for {self._deadlines.silence_s:g} s"
        return f"no handshake within {self._deadlines.handshake_s:g} s"

    @property
    def deadline(self) -> float:
        """Return when the next heartbeat is due, or the peer is given up on."""
        return min(self._beat, self._patience) if self._is_open else self._patience

    @property
    def _patience(self) -> float:
        """Return when the peer is given up on if nothing is heard."""
        if self._is_open:
            return self._heard + self._deadlines.silence_s
        return self._began + self._deadlines.handshake_s

    def _note_activity(self, now: float) -> None:
        self.has_acted = False
        self._active = now
        self._beat = min(self._beat, now + self._deadlines.heartbeat_s)


_K = TypeVar("_K", bound=Hashable)
_FEW: Final = 64


class Timers(Generic[_K]):
    """One time for each key, in a heap.

    A time that is replaced stays in the heap until it is reached, or until such times are most of it.
    """

    def __init__(self) -> None:
        self._times: dict[_K, float] = {}
        self._heap: list[tuple[float, int, _K]] = []
        self._numbers = count()  # keys need no order

    def __len__(self) -> int:
        return len(self._times)

    @property
    def next(self) -> float:
        """The earliest time; infinity if there is none."""
        while self._heap and self._is_stale(self._heap[0]):
            heappop(self._heap)
        return self._heap[0][0] if self._heap else inf

    def set(self, key: _K, when: float) -> None:
        """Set the time at which a key is due, in place of the one before."""
        if self._times.get(key) != when:
            self._times[key] = when
            heappush(self._heap, (when, next(self._numbers), key))
            if len(self._heap) > 2 * len(self._times) + _FEW:
                self._heap = [entry for entry in self._heap if not self._is_stale(entry)]
                heapify(self._heap)

    def discard(self, key: _K) -> None:
        """Remove a key: it is never due."""
        self._times.pop(key, None)

    def pop_due(self, now: float) -> list[_K]:
        """Return the keys whose time has come, earliest first. They have no time until they get another."""
        due = []
        while self.next <= now and self._heap:
            _, _, key = heappop(self._heap)
            del self._times[key]
            due.append(key)
        return due

    def _is_stale(self, entry: tuple[float, int, _K]) -> bool:
        return self._times.get(entry[2]) != entry[0]
