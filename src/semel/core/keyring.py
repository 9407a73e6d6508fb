"""API keys and their tenants.

A keyring stores hashes of the keys, made with a random secret of its own. It cannot reveal a key. The time of a lookup
does not depend on how close a key is to a valid one (threats S17).

A key may be given to it hashed: `sha256:` and 64 hexadecimal digits. A slow hash is for passwords that people choose:
it makes guessing them expensive. An API key is random, 128 bits as the docs make it, and cannot be guessed at any
speed; and strangers could spend the cost of a hash on the event loop, once for each wrong key that they send.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable
from typing import Final

from blake3 import blake3

__all__ = ["MIN_KEY_CHARS", "Keyring", "hash_key", "is_hashed", "is_key", "is_sendable"]

MIN_KEY_CHARS: Final = 16

_HASHED: Final = "sha256:"
_HASH: Final = re.compile(r"[0-9a-f]{64}", re.IGNORECASE)


def hash_key(key: str) -> str:
    """Return the hashed form of a key, which a file of keys may have in its place."""
    return _HASHED + _sha256(key).hex()


def is_key(text: str) -> bool:
    """Return whether a text can be a key: it fits into a header unchanged and is long enough not to be guessed."""
    return len(text) >= MIN_KEY_CHARS and is_sendable(text)


def is_sendable(text: str) -> bool:
    """Return whether a text fits into a header unchanged."""
    return bool(text) and text.isascii() and text.isprintable() and " " not in text


def is_hashed(text: str) -> bool:
    """Return whether a key is given in its hashed form."""
    return text.startswith(_HASHED)


class Keyring:
    """The clients' keys, each with its tenant's name. A tenant may have several keys, so that keys can be rotated."""

    def __init__(self, keys: Iterable[tuple[str, str]] = ()) -> None:
        self._secret = secrets.token_bytes(blake3.key_size)
        self._tenants: dict[bytes, str] = {}
        for number, (tenant, key) in enumerate(keys, 1):
            found = self._index(_stored_hash(number, key))
            if self._tenants.setdefault(found, tenant) != tenant:
                raise ValueError(f"key {number} is the same key as that of another tenant: give each its own")

    def __len__(self) -> int:
        return len(self._tenants)

    def __repr__(self) -> str:
        return f"Keyring({len(self)} keys of {len(set(self._tenants.values()))} tenants)"

    def tenant(self, key: str) -> str | None:
        """Return the name of the key's tenant; None for an unknown key."""
        return self._tenants.get(self._index(_sha256(key)))

    def replace(self, other: Keyring) -> None:
        """Have the keys of another from now on. A keyring that has keys is never left without: all would be let in."""
        if self._tenants and not other._tenants:
            raise ValueError("there are no keys in it")
        self._secret, self._tenants = other._secret, other._tenants

    def _index(self, hashed: bytes) -> bytes:
        return blake3(hashed, key=self._secret).digest()


def _sha256(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _stored_hash(number: int, text: str) -> bytes:
    """The hash of a key that is stored as it is, or hashed. An error has no name of a tenant: it may be the key."""
    if is_hashed(text):
        digits = text.removeprefix(_HASHED)
        if not _HASH.fullmatch(digits):
            raise ValueError(f"key {number} is not a hash: {_HASHED} needs 64 hexadecimal digits after it")
        return bytes.fromhex(digits)
    if len(text) < MIN_KEY_CHARS:
        raise ValueError(f"key {number} is too short ({len(text)} of {MIN_KEY_CHARS} characters)")
    if not is_sendable(text):
        raise ValueError(f"key {number} has a blank, or a character that is not printable ASCII")
    return _sha256(text)
