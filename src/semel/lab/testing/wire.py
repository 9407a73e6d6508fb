"""A connection in memory, for tests: two sessions, a clock, and faults that a socket does not produce on demand.

Nothing waits or sleeps: `run` moves messages until both ends are idle, `pass_time` moves the clock from deadline to
deadline. The receiver gets a copy, as from a socket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from semel.wire.codec import Frames
from semel.wire.events import Event
from semel.wire.session import Session

__all__ = ["MemoryWire", "Mischief"]


@dataclass(frozen=True, slots=True)
class Mischief:
    """A fault of one message; messages of both directions are counted together."""

    message: int
    kind: Literal["drop", "duplicate", "delay", "truncate", "drop frame", "duplicate frame"]
    at: int = 0
    """How many bytes of the last frame `truncate` leaves; modulo its size, so that any number is valid."""

    def apply(self, frames: Frames) -> list[Frames]:
        """Return the messages that arrive instead."""
        match self.kind:
            case "drop":
                return []
            case "duplicate":
                return [frames, frames]
            case "delay":
                return [frames]
            case "truncate":
                last = frames[-1]
                return [[*frames[:-1], last[: self.at % max(1, len(last))]]]
            case "drop frame":
                return [frames[:-1]]
            case "duplicate frame":
                return [[*frames, frames[-1]]]


class MemoryWire:
    """Connects a frontend's session to a worker's."""

    def __init__(
        self, frontend: Session, worker: Session, *, now: float = 0.0, mischief: Sequence[Mischief] = ()
    ) -> None:
        self.now = now
        self.sent = 0
        """The number of messages put on the wire."""

        self.frontend_events: list[Event] = []
        self.worker_events: list[Event] = []
        self._frontend = frontend
        self._worker = worker
        self._mischief = {one.message: one for one in mischief}

    def run(self) -> None:
        """Move messages both ways until there are none."""
        while True:
            forth = self._carry(self._frontend.outgoing(self.now))
            back = self._carry(self._worker.outgoing(self.now))
            if not forth and not back:
                return
            for frames in forth:
                self.worker_events += self._worker.receive(frames, self.now)
            for frames in back:
                self.frontend_events += self._frontend.receive(frames, self.now)

    def pass_time(self, seconds: float) -> None:
        """Let time pass for both ends, and move the messages that they send meanwhile."""
        end = self.now + seconds
        while True:
            self.run()
            due = min(self._frontend.next_deadline(), self._worker.next_deadline())
            if due > end:
                self.now = end
                return
            self.now = max(self.now, due)
            self.frontend_events += self._frontend.tick(self.now)
            self.worker_events += self._worker.tick(self.now)

    def _carry(self, messages: list[Frames]) -> list[Frames]:
        """Return the messages that arrive of those sent in one direction at one time."""
        arriving: list[Frames] = []
        delayed: list[Frames] = []
        for message in messages:
            frames: Frames = [bytes(frame) for frame in message]
            mischief = self._mischief.get(self.sent)
            self.sent += 1
            if mischief is None:
                arriving += [frames, *delayed]
                delayed = []
            elif mischief.kind == "delay":
                delayed.append(frames)
            else:
                arriving += mischief.apply(frames)
        return arriving + delayed
