"""When an end of a session gives a sign of life, and how long it waits for the peer's. Pure, the time is passed in.

While something goes on in a session, both ends beat once a second: a message that is lost, and a frontend that is gone,
are noticed with the next beat. A session in which nothing goes on beats ten times more seldom; a worker that tells how
busy it is does not count as something. So a thousand idle sessions take little of a worker's time.
"""

from __future__ import annotations

from semel.wire.limits import Deadlines

__all__ = ["Liveness"]


class Liveness:
    """The times of one end of a session."""

    def __init__(self, deadlines: Deadlines, now: float) -> None:
        self._deadlines = deadlines
        self._began = self._heard = self._beat = self._active = now
        self._is_open = False
        self.has_acted = False
        """Whether something was sent that is more than a sign of life; its sender sets it."""

    def open(self, now: float) -> None:
        """Both ends have proved that they have the key."""
        self._is_open = True
        self._heard = self._active = now
        self._beat = now + self._deadlines.heartbeat_s

    def hear(self, now: float, *, is_activity: bool) -> None:
        """A message came, which may be more than a sign of life."""
        self._heard = now
        if is_activity:
            self._note_activity(now)

    def excuse(self, now: float) -> None:
        """Let the peer be heard until the next heartbeat: this process has not read what it may have sent."""
        grace_s = self._deadlines.heartbeat_s
        self._heard = max(self._heard, now + grace_s - self._deadlines.silence_s)
        self._began = max(self._began, now + grace_s - self._deadlines.handshake_s)

    def takes_beat(self, now: float) -> bool:
        """Whether a heartbeat is due; then the next one is due later."""
        if self.has_acted:
            self._note_activity(now)
        if now < self._beat:
            return False
        is_idle = now >= self._active + self._deadlines.active_s
        self._beat = now + (self._deadlines.idle_heartbeat_s if is_idle else self._deadlines.heartbeat_s)
        return True

    def fault(self, now: float) -> str | None:
        """Why the peer is given up on, if it is."""
        if now < self._patience:
            return None
        if self._is_open:
            return f"nothing heard for {self._deadlines.silence_s:g} s"
        return f"no handshake within {self._deadlines.handshake_s:g} s"

    @property
    def deadline(self) -> float:
        """When the next heartbeat is due, or the peer is given up on."""
        return min(self._beat, self._patience) if self._is_open else self._patience

    @property
    def _patience(self) -> float:
        """When the peer is given up on if nothing is heard."""
        if self._is_open:
            return self._heard + self._deadlines.silence_s
        return self._began + self._deadlines.handshake_s

    def _note_activity(self, now: float) -> None:
        self.has_acted = False
        self._active = now
        self._beat = min(self._beat, now + self._deadlines.heartbeat_s)
