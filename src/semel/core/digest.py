"""Identity: what makes two items the same item.

A digest is keyed blake3 over framed parts: the media bytes as they came, the processor's fingerprint, the options, the
tenant. Framing writes every length before its bytes, so two different lists of parts never hash the same input
(threats S11). The tenant is a part, so two tenants never share a digest (S12), and the key is secret, so nobody
outside the fleet can compute one. A URL is never an identity.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Self

from blake3 import blake3

__all__ = ["Digest", "Identity", "Key", "Tenant", "digest", "frame", "hash_parts"]

_DOMAIN: Final = "semel.digest.1"
_LENGTH_BYTES: Final = 8


class Digest(bytes):
    """The 256-bit identity of an item: 32 bytes that compare and hash as such."""

    __slots__ = ()
    size: Final = 32

    def __new__(cls, raw: bytes) -> Self:  # noqa: D102
        if len(raw) != cls.size:
            raise ValueError(f"a digest has {cls.size} bytes, these are {len(raw)}")
        return super().__new__(cls, raw)

    def __repr__(self) -> str:
        return f"Digest({self.hex()[:12]}…)"


@dataclass(frozen=True, slots=True, repr=False)
class Key:
    """The fleet's secret, which keys every digest. Its `id` may be shown and compared; the secret may not."""

    secret: bytes

    def __post_init__(self) -> None:
        if len(self.secret) != blake3.key_size:
            raise ValueError(f"a fleet key has {blake3.key_size} bytes, these are {len(self.secret)}")

    @property
    def id(self) -> str:
        """Names the key without telling it: equal ids mean equal keys."""
        return blake3(b"semel.key.id.1", key=self.secret).hexdigest(length=8)

    def __repr__(self) -> str:
        return f"Key(id={self.id})"


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose items these are: the name bound to the API key, and the request's `cache_salt`."""

    name: str = ""
    salt: str | None = None

    @property
    def parts(self) -> tuple[bytes, bytes]:
        """What it is in every hash: two parts, to be framed; no two tenants have the same (threats S12).

        A missing salt and an empty one are different tenants: a salt that is there has a byte in front. Half of a
        surrogate pair is a `UnicodeEncodeError`.
        """
        return self.name.encode(), b"" if self.salt is None else b"\x01" + self.salt.encode()

    @property
    def prefix_salt(self) -> str | None:
        """What keeps the tenant's prefixes apart in an engine's cache: no two tenants have the same (threats S12).

        Of the unnamed tenant it is the request's own salt, as with a bare engine, unless that looks like one of ours.
        """
        if not self.name and (self.salt is None or not self.salt.startswith("\0")):
            return self.salt
        return f"\0{self.name}\n" if self.salt is None else f"\0{self.name}\n\1{self.salt}"


class Identity:
    """Gives the digests of items that share everything but their media.

    All but the media is hashed once: with 32,768 items in a request a digest costs 3 µs instead of 20.
    """

    __slots__ = ("_shared",)

    def __init__(
        self,
        *,
        key: Key,
        modality: str,
        fingerprint: str,
        options: Mapping[str, object] | None = None,
        tenant: Tenant | None = None,
    ) -> None:
        tenant = tenant or Tenant()
        canonical = json.dumps(options or {}, sort_keys=True, separators=(",", ":"), allow_nan=False)
        shared = (part.encode() for part in (_DOMAIN, modality, fingerprint, canonical))
        self._shared = hash_parts((*shared, *tenant.parts), key)

    def digest(self, media: bytes) -> Digest:
        """The digest of one item."""
        hasher = self._shared.copy()
        hasher.update(_length(media))
        hasher.update(media)
        return Digest(hasher.digest())


def frame(parts: Iterable[bytes | memoryview]) -> Iterable[bytes | memoryview]:
    """The parts, each behind its length; no two different lists of parts give the same concatenation."""
    for part in parts:
        yield _length(part)
        yield part


def hash_parts(parts: Iterable[bytes | memoryview], key: Key | None = None) -> blake3:
    """A hash of the parts, framed; keyed where a key is passed."""
    hasher = blake3() if key is None else blake3(key=key.secret)
    for piece in frame(parts):
        hasher.update(piece)
    return hasher


def digest(
    media: bytes,
    *,
    key: Key,
    modality: str,
    fingerprint: str,
    options: Mapping[str, object] | None = None,
    tenant: Tenant | None = None,
) -> Digest:
    """The digest of one item.

    `fingerprint` is the processor's (`semel.processing`), as a worker's contract states it; `options` are the request's
    `mm_processor_kwargs`, which must be JSON values. The order of their keys does not matter.
    """
    shared = Identity(key=key, modality=modality, fingerprint=fingerprint, options=options, tenant=tenant)
    return shared.digest(media)


def _length(part: bytes | memoryview) -> bytes:
    return memoryview(part).nbytes.to_bytes(_LENGTH_BYTES, "little")
