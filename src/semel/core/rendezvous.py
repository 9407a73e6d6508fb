"""Rendezvous hashing: which of several nodes a key belongs to, the same for all who ask. Pure.

A node that comes or goes moves only the keys that it wins or had.
"""

from __future__ import annotations

from hashlib import blake2b

__all__ = ["rank"]


def rank(name: str, key: bytes) -> tuple[bytes, str]:
    """How high a node stands for a key of at most 64 bytes: the highest has it."""
    return blake2b(name.encode(), key=key, digest_size=8).digest(), name
