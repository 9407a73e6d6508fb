"""Media: bytes as they came, before anyone has decoded them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Media", "Modality"]

Modality = Literal["audio", "image", "video"]


@dataclass(frozen=True, slots=True, repr=False)
class Media:
    """The bytes of one image, clip or video as they came, with what the request called them."""

    modality: Modality
    data: bytes
    mime: str | None = None
    """What the sender says it is: a hint for messages, never trusted for decoding."""

    def __repr__(self) -> str:
        return f"Media({self.modality}, {self.mime or 'unknown type'}, {len(self.data):,} bytes)"
