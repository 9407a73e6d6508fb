"""How much and how long: the sizes and times that both ends of a session hold each other to.

The sizes are part of the protocol: a sender keeps to them, a receiver refuses what is over, so both ends must use the
same. The times may differ from process to process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["MAX_ITEMS", "MAX_TENSORS", "Deadlines", "Limits"]

MAX_ITEMS: Final = 32_768
"""Items of one prompt."""

MAX_TENSORS: Final = 64
"""Tensors of one feature."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes, checked before anything is allocated (threats S10)."""

    max_handshake_bytes: int = 16 << 10
    """A message of a peer that has not proved itself."""

    max_control_bytes: int = 16 << 20
    """A message without its buffers: a prompt of a million tokens and 32,768 items takes 6 MB."""

    max_feature_bytes: int = 256 << 20
    """The tensors of one feature."""

    inline_bytes: int = 1 << 20
    """A feature up to this size travels in one message; a larger one in chunks between control messages."""

    chunk_bytes: int = 256 << 10
    """The most tensor bytes in one chunk."""

    window_bytes: int = 2 << 20
    """Bulk on its way that the receiver has not read: what an urgent message may have to wait behind."""

    max_open_features: int = 16
    """Features that travel at the same time."""

    max_open_bytes: int = 512 << 20
    """Their bytes: what reassembly may hold."""

    max_unread_bytes: int = 64 << 20
    """Control messages that the peer has not read; over this it is taken for stuck, and the session resets."""

    @property
    def max_frame_bytes(self) -> int:
        """The largest frame of any message: what a socket may accept at all."""
        return max(self.max_control_bytes, self.inline_bytes)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Times in seconds."""

    handshake_s: float = 5.0
    """From the connection to both proofs."""

    heartbeat_s: float = 1.0
    """Between two signs of life, whatever else is sent."""

    silence_s: float = 10.0
    """Without any message from the peer, after which it is taken for dead."""
