"""Rendezvous hashing: which of several nodes a key belongs to, the same for all who ask. Pure.

A node that comes or goes moves only the keys that it wins or had.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b

__all__ = ["rank", "scores"]


def rank(name: str, key: bytes) -> tuple[bytes, str]:
    """Return how high a node stands for a key of at most 64 bytes: the highest has it."""
    return next(scores([name.encode()], key)), name


def scores(names: Iterable[bytes], key: bytes) -> Iterator[bytes]:
    """Yield the same for many nodes, without the names, which decide between equal scores."""
    keyed = blake2b(key=key, digest_size=8)
    for name in names:
        hasher = keyed.copy()
        hasher.update(name)
        yield hasher.digest()
