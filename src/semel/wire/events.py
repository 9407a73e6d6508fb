"""What a session tells its owner. Messages that are meant for the owner are events themselves."""

from __future__ import annotations

from dataclasses import dataclass

from semel.core import Contract, Digest, Feature
from semel.wire.messages import (
    Abort,
    Accepted,
    Delta,
    Drain,
    Draining,
    Failed,
    Forget,
    Gone,
    Have,
    Lend,
    Load,
    Need,
    Submit,
)

__all__ = ["Admitted", "Arrived", "Closed", "Event", "Opened", "Reset", "Violation"]


@dataclass(frozen=True, slots=True)
class Opened:
    """To a frontend: the worker has proved itself, and expects this."""

    contract: Contract


@dataclass(frozen=True, slots=True)
class Admitted:
    """To a worker: this frontend has proved itself."""

    frontend_id: str


@dataclass(frozen=True, slots=True)
class Arrived:
    """To a worker: all bytes of a feature are here. It has not been held against the contract."""

    digest: Digest
    feature: Feature


@dataclass(frozen=True, slots=True)
class Closed:
    """The peer has said goodbye; nothing was lost."""

    message: str


@dataclass(frozen=True, slots=True)
class Reset:
    """The session is over, whatever was under way in it is lost, and a new one must be opened.

    Codes, for metrics: `busy` too many peers · `gone` the connection broke · `handshake` a message before its time ·
    `key` another fleet key · `malformed` cannot be read · `order` a rule between messages is broken · `overrun` the
    peer does not read · `protocol` another version · `sequence` a gap, a repeat, a swap · `session` another epoch ·
    `silence` nothing heard in time.
    """

    code: str
    message: str


Event = (
    Opened
    | Admitted
    | Submit
    | Arrived
    | Lend
    | Abort
    | Drain
    | Accepted
    | Delta
    | Failed
    | Draining
    | Load
    | Have
    | Gone
    | Need
    | Forget
    | Closed
    | Reset
)


class Violation(Exception):
    """Inside the package only: the peer broke a rule, and the session resets with this code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
