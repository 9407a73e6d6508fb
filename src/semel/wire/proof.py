"""Values derived from a key: the proofs of a handshake, a session's epoch, the CURVE keys that a fleet key stands for.

Every derivation is keyed blake3 over framed parts that begin with a name of their own. So no derived value can replace
another, nor a digest. A proof includes the role of its author, so it cannot be sent back to that author.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Literal

from semel.core import Key, hash_parts

__all__ = ["HandshakeTranscript", "Role", "curve_secret"]

Role = Literal["frontend", "worker"]


@dataclass(frozen=True, slots=True)
class HandshakeTranscript:
    """The messages that both ends of a handshake have seen when they prove that they have the key."""

    protocol: int
    frontend_id: str
    frontend_nonce: bytes
    worker_nonce: bytes

    def proof(self, key: Key, role: Role) -> bytes:
        """Return the proof that the end with this role has the key."""
        return self._derive(key, f"semel.wire.proof.{role}.1")

    def is_proof(self, proof: bytes, key: Key, role: Role) -> bool:
        """Return whether this is the proof of that role; takes the same time for either answer."""
        return hmac.compare_digest(proof, self.proof(key, role))

    def epoch(self, key: Key) -> int:
        """Return the number of the session: never 0, different in every session, and computable only with the key."""
        return int.from_bytes(self._derive(key, "semel.wire.epoch.1")[:8], "little") | 1

    def _derive(self, key: Key, name: str) -> bytes:
        protocol = self.protocol.to_bytes(8, "little")
        return _derive(key, name.encode(), protocol, self.frontend_id.encode(), self.frontend_nonce, self.worker_nonce)


def curve_secret(key: Key, role: Role) -> bytes:
    """Return the X25519 secret of a role that has no other: any holder of the fleet key can be either role."""
    return _derive(key, f"semel.wire.curve.{role}.1".encode())


def _derive(key: Key, *parts: bytes) -> bytes:
    return hash_parts(parts, key).digest()
