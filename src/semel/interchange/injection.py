"""The outcomes of injected features: the response of a worker's admin address, and its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from semel.errors import ProtocolError

__all__ = ["Outcome", "Outcomes", "Status", "decode", "encode"]

Status = Literal["held", "refused", "skipped", "stored"]
"""`held`: was already there. `skipped`: not stored, though nothing is wrong with it. `refused`: never stored."""


class Outcome(Struct, frozen=True):
    """The outcome of one injected item."""

    digest: str
    """In hexadecimal. For an item that was refused because of its digest's form, the text in place of the digest."""

    status: Status
    reason: str | None = None
    """The reason for which the item was skipped or refused."""


class Outcomes(Struct, frozen=True):
    """The response to an injection."""

    outcomes: list[Outcome]


def encode(outcomes: Sequence[Outcome]) -> bytes:
    """Encode the response to an injection."""
    return msgspec.json.encode(Outcomes(list(outcomes)))


def decode(body: bytes) -> list[Outcome]:
    """Decode a worker's response."""
    try:
        return msgspec.json.decode(body, type=Outcomes).outcomes
    except (msgspec.MsgspecError, ValueError) as error:
        raise ProtocolError(f"this is no answer to an injection: {error}") from None
