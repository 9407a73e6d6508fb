"""API keys and their tenants.

A keyring stores hashes of the keys, made with a random secret of its own. It cannot reveal a key. The time of a lookup
does not depend on how close a key is to a valid one (threats S17).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Final

from blake3 import blake3

__all__ = ["MIN_KEY_CHARS", "Keyring", "is_key"]

MIN_KEY_CHARS: Final = 16


def is_key(text: str) -> bool:
    """Whether a text can be a key: it fits into a header unchanged and is long enough not to be guessed."""
    return len(text) >= MIN_KEY_CHARS and text.isascii() and text.isprintable() and " " not in text


class Keyring:
    """The clients' keys, each with its tenant's name. A tenant may have several keys, so that keys can be rotated."""

    def __init__(self, keys: Iterable[tuple[str, str]] = ()) -> None:
        self._secret = secrets.token_bytes(blake3.key_size)
        self._tenants: dict[bytes, str] = {}
        for tenant, key in keys:
            if not is_key(key):
                raise ValueError(
                    f"the key of {tenant!r} is none: a key has at least {MIN_KEY_CHARS} printable ASCII characters "
                    "and no blank"
                )
            if self._tenants.setdefault(self._hash(key), tenant) != tenant:
                raise ValueError(f"{tenant!r} has the same key as {self.tenant(key)!r}")

    def __len__(self) -> int:
        return len(self._tenants)

    def __repr__(self) -> str:
        return f"Keyring({len(self)} keys of {len(set(self._tenants.values()))} tenants)"

    def tenant(self, key: str) -> str | None:
        """The name of the key's tenant; None for an unknown key."""
        return self._tenants.get(self._hash(key))

    def _hash(self, key: str) -> bytes:
        return blake3(key.encode(errors="surrogateescape"), key=self._secret).digest()
