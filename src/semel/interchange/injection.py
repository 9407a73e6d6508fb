"""What became of injected features: the answer of a worker's admin address, and its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from semel.errors import ProtocolError

__all__ = ["Outcome", "Outcomes", "Status", "decode", "encode"]

Status = Literal["held", "refused", "skipped", "stored"]
"""`held`: it was there already. `skipped`: not stored, and nothing is wrong with it. `refused`: never stored."""


class Outcome(Struct, frozen=True):
    """What became of one injected item."""

    digest: str
    """In hexadecimal; of an item that was refused for the form of its digest, what stood in its place."""

    status: Status
    reason: str | None = None
    """Why it was skipped or refused."""


class Outcomes(Struct, frozen=True):
    """The answer to an injection."""

    outcomes: list[Outcome]


def encode(outcomes: Sequence[Outcome]) -> bytes:
    """The answer to an injection."""
    return msgspec.json.encode(Outcomes(list(outcomes)))


def decode(body: bytes) -> list[Outcome]:
    """The outcomes that a worker answered with."""
    try:
        return msgspec.json.decode(body, type=Outcomes).outcomes
    except (msgspec.MsgspecError, ValueError) as error:
        raise ProtocolError(f"this is no answer to an injection: {error}") from None
