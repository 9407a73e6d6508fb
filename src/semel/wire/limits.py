"""Sizes and times that both ends of a session enforce.

The sizes are part of the protocol: a sender respects them, and a receiver refuses anything larger, so both ends must
use the same values. The times may differ between processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["MAX_ITEMS", "MAX_TENSORS", "Deadlines", "Limits"]

MAX_ITEMS: Final = 32_768
"""Maximum number of items in one prompt."""

MAX_TENSORS: Final = 64
"""Maximum number of tensors in one feature."""

_IDLE_BEATS: Final = 10
_BEATS_PER_SILENCE: Final = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes, checked before anything is allocated (threats S10)."""

    max_handshake_bytes: int = 16 << 10
    """A message from a peer that has not proved that it has the key."""

    max_control_bytes: int = 16 << 20
    """A message without its buffers: a prompt with a million tokens and 32,768 items takes 6 MB."""

    max_feature_bytes: int = 256 << 20
    """The tensors of one feature."""

    inline_bytes: int = 1 << 20
    """A feature up to this size is sent in one message; a larger one in chunks between control messages."""

    chunk_bytes: int = 256 << 10
    """Maximum number of tensor bytes in one chunk."""

    window_bytes: int = 2 << 20
    """Bulk bytes in transit that the receiver has not read: an urgent message may have to wait behind these."""

    max_open_features: int = 16
    """Features in transit at the same time."""

    max_open_bytes: int = 512 << 20
    """Bytes of these features: the memory that reassembly may use."""

    max_unread_bytes: int = 64 << 20
    """Control messages that the peer has not read. Above this, the peer counts as stuck and the session resets."""

    max_unread_slice_bytes: int = 64 << 10
    """Control messages that the peer has not read, above which no slice of a snapshot is sent: it takes in a slice at
    its own pace, and a thousand snapshots at once are no more than it can read."""

    @property
    def max_frame_bytes(self) -> int:
        """The largest frame of any message: the limit of a socket."""
        return max(self.max_control_bytes, self.inline_bytes)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Times in seconds."""

    handshake_s: float = 5.0
    """From the connection until both proofs are checked."""

    heartbeat_s: float = 1.0
    """Between two heartbeats, whatever else is sent, while something goes on in the session."""

    connection_s: float = 10.0
    """Without a sign of the peer's connection, which zmq's own thread gives even while the event loop is busy; after
    that, the peer's process or host counts as dead."""

    ping_s: float = 2.5
    """Between two such signs."""

    silence_s: float = 60.0
    """Without any message from the peer; after that, its event loop counts as stuck."""

    @property
    def active_s(self) -> float:
        """Return how long something goes on in a session after its last message that was more than a sign of life."""
        return _IDLE_BEATS * self.heartbeat_s

    @property
    def idle_heartbeat_s(self) -> float:
        """Between two heartbeats in a session in which nothing goes on: a thousand of them take little then."""
        return max(self.heartbeat_s, min(_IDLE_BEATS * self.heartbeat_s, self.silence_s / _BEATS_PER_SILENCE))
