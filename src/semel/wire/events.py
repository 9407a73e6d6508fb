"""The events that a session reports to its owner. Messages for the owner are events themselves."""

from __future__ import annotations

from dataclasses import dataclass, field

from semel.core import Contract, Digest, Feature
from semel.wire.messages import Resume, ToFrontend, ToWorker

__all__ = ["Admitted", "Arrived", "Closed", "Event", "Opened", "Reset", "Violation"]


@dataclass(frozen=True, slots=True)
class Opened:
    """For a frontend: the worker has proved that it has the key, and states its contract."""

    contract: Contract
    incarnation: bytes = field(default=b"", compare=False)
    """Of the worker's process."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """For a worker: this frontend has proved that it has the key."""

    frontend_id: str
    key_id: str = field(default="", compare=False)
    """Which of the worker's keys."""

    resume: Resume | None = None
    """The state that it says it has."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """For a worker: all bytes of a feature have arrived. It is not yet checked against the contract."""

    digest: Digest
    feature: Feature


@dataclass(frozen=True, slots=True)
class Closed:
    """The peer closed the session; nothing was lost."""

    message: str


@dataclass(frozen=True, slots=True)
class Reset:
    """The session is over, everything in transit is lost, and the owner must open a new one.

    Codes, for metrics: `busy` too many peers · `engine_dead`, `engine_hung` the worker ends with its engine · `gone`
    the connection broke · `handshake` a message before its time · `key` another fleet key · `malformed` cannot be read
    · `order` a rule between messages is broken · `overrun` the peer does not read · `protocol` another version ·
    `sequence` a gap, a repeat, a swap · `session` another epoch · `silence` nothing received in time.
    """

    code: str
    message: str


Event = Opened | Admitted | Arrived | ToWorker | ToFrontend | Closed | Reset


class Violation(Exception):
    """Inside this package only: the peer broke a rule, and the session resets with this code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
