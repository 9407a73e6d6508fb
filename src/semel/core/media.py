"""Media: bytes as they came, before anyone has decoded them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["Media", "Modality"]

Modality = Literal["audio", "image", "video"]

_SHOWN_CHARS: Final = 64


@dataclass(frozen=True, slots=True, repr=False)
class Media:
    """The bytes of one image, clip or video as they came, with what the request called them."""

    modality: Modality
    data: bytes
    mime: str | None = None
    """What the sender says it is: a hint for messages, never trusted for decoding."""

    def __repr__(self) -> str:
        mime = "unknown type" if self.mime is None else repr(self.mime[:_SHOWN_CHARS])  # a client's words, in our log
        return f"Media({self.modality}, {mime}, {len(self.data):,} bytes)"
