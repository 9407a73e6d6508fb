"""Seals of records in a store: a keyed hash of a record's ID and its bytes.

A record that was changed, moved to another place, or written by somebody without the key, is none.
"""

from __future__ import annotations

from hmac import compare_digest
from typing import Final

from blake3 import blake3

from semel.core import Digest, Key, hash_parts

__all__ = ["Seal"]


class Seal:
    """The seals of one kind of record, which its `domain` names."""

    NBYTES: Final = 32

    def __init__(self, domain: bytes, key: Key) -> None:
        self._secret = Key(hash_parts((domain,), key).digest()).secret

    def close(self, digest: Digest, *pieces: bytes | memoryview) -> bytes:
        """Return a record: its seal, and the pieces."""
        return b"".join((self._of(digest, *pieces), *pieces))

    def open(self, digest: Digest, record: memoryview) -> memoryview | None:
        """Return what a record has behind its seal; None for one that nobody with the key has written under this ID."""
        content = record[self.NBYTES :]
        return content if compare_digest(record[: self.NBYTES], self._of(digest, content)) else None

    def _of(self, digest: Digest, *pieces: bytes | memoryview) -> bytes:
        hasher = blake3(digest, key=self._secret)
        for piece in pieces:
            hasher.update(piece)
        return hasher.digest()
