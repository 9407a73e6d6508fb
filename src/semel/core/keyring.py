"""API keys, and whose they are.

A keyring keeps hashes of the keys, made with a secret of its own: it cannot give a key away, and looking one up takes
as long for a key that is nearly right as for one that is not (threats S17).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Final

from blake3 import blake3

__all__ = ["MIN_KEY_CHARS", "Keyring", "is_key"]

MIN_KEY_CHARS: Final = 16


def is_key(text: str) -> bool:
    """Whether a text can be a key: it goes into a header as it is, and cannot be guessed."""
    return len(text) >= MIN_KEY_CHARS and text.isascii() and text.isprintable() and " " not in text


class Keyring:
    """The keys of the clients, each with the name of its tenant. A tenant may have several, to change them in turn."""

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
        """Whose key it is; None if it is nobody's."""
        return self._tenants.get(self._hash(key))

    def _hash(self, key: str) -> bytes:
        return blake3(key.encode(errors="surrogateescape"), key=self._secret).digest()
