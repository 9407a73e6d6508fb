"""Values that callers of a media store pass to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from semel.media.signature import FileKind

__all__ = ["FRONTEND", "Payer", "Pin", "Spend", "Upload", "no_pin"]

Spend = Callable[[int], None]
"""Is called with the number of bytes before they are read, and raises if they are not allowed."""

Pin = Callable[[int], Callable[[], None]]
"""Is called with the number of bytes when an operation begins that holds them and that nobody can stop. What it returns
is called when that has ended, also if nobody waits for it."""


def no_pin(_: int) -> Callable[[], None]:
    """Do nothing, for bytes that are charged to nobody."""
    return lambda: None


@dataclass(frozen=True, slots=True)
class Payer:
    """For whom an operation of a store is: its bound is theirs, and so are its bytes."""

    owner: str = ""
    """The tenant's name in the store; empty for the frontend itself."""

    pin: Pin = no_pin


FRONTEND: Final = Payer()


@dataclass(frozen=True, slots=True)
class Upload:
    """A file that a client sends."""

    data: bytes | bytearray
    """Nobody changes it any more."""

    content: bytes
    """The blake3 hash of its bytes."""

    name: str
    purpose: str
    ttl_s: int | None = None
    """Seconds for which it is kept, if not the store's own."""

    modality: FileKind | None = None
    """The kind as which it was sent in a request; otherwise its first bytes tell."""
