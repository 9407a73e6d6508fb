"""Media: bytes as received, before decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["Media", "Modality"]

Modality = Literal["audio", "image", "video"]

_SHOWN_CHARS: Final = 64


@dataclass(frozen=True, slots=True, repr=False)
class Media:
    """The bytes of one image, clip or video as received, with the type that the request states."""

    modality: Modality
    data: bytes
    mime: str | None = None
    """The type that the sender states. Messages show it; decoding never trusts it."""

    @property
    def nbytes(self) -> int:
        """The bytes that it has in memory."""
        return len(self.data)

    def __repr__(self) -> str:
        mime = "unknown type" if self.mime is None else repr(self.mime[:_SHOWN_CHARS])  # a client's text, in a log line
        return f"Media({self.modality}, {mime}, {len(self.data):,} bytes)"
