"""Events of the encoder outputs in an engine's host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from semel.core import Digest, Form

__all__ = ["Gone", "Overrun", "Reset", "Saved", "TierEvent"]


@dataclass(frozen=True, slots=True)
class Saved:
    """An output is in the host cache, whole."""

    digest: Digest
    transfer: int
    """No two outputs have the same, also not two of one digest."""
    extents: tuple[tuple[int, int], ...]
    form: Form


@dataclass(frozen=True, slots=True)
class Gone:
    """An output is not in the host cache any more; its blocks may be overwritten."""

    digest: Digest
    transfer: int


@dataclass(frozen=True, slots=True)
class Reset:
    """Everything is gone from the host cache."""

    new_weights: bool


@dataclass(frozen=True, slots=True)
class Overrun:
    """A loss of events, because nobody read them in time: nothing is known to be in the host cache."""


TierEvent: TypeAlias = Saved | Gone | Reset | Overrun
