"""Identity: when two items are the same item.

A digest is keyed blake3 over framed parts: the unmodified media bytes, the processor's fingerprint, the options and the
tenant. Framing writes each length before its bytes, so two different lists of parts never produce the same input
(threats S11). The tenant is a part, so two tenants never share a digest (S12). The key is secret, so no process outside
the fleet can compute a digest. A URL is never an identity.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Self

from blake3 import blake3

__all__ = ["Digest", "Identity", "Key", "Tenant", "digest", "frame", "hash_parts", "tenant_name"]

_DOMAIN: Final = "semel.digest.1"
_LENGTH_BYTES: Final = 8


class Digest(bytes):
    """The 256-bit identity of an item: 32 bytes, compared and hashed as bytes."""

    __slots__ = ()
    size: Final = 32

    def __new__(cls, raw: bytes) -> Self:  # noqa: D102
        if len(raw) != cls.size:
            raise ValueError(f"a digest has {cls.size} bytes, these are {len(raw)}")
        return bytes.__new__(cls, raw)  # by `super()` it takes twice as long, and a snapshot has thousands

    def __repr__(self) -> str:
        return f"Digest({self.hex()[:12]}…)"


@dataclass(frozen=True, slots=True, repr=False)
class Key:
    """The fleet's secret, which keys every digest. Its `id` may be logged and compared; the secret may not."""

    secret: bytes

    def __post_init__(self) -> None:
        if len(self.secret) != blake3.key_size:
            raise ValueError(f"a fleet key has {blake3.key_size} bytes, these are {len(self.secret)}")

    @property
    def id(self) -> str:
        """Identifies the key without revealing it: equal ids mean equal keys."""
        return blake3(b"semel.key.id.1", key=self.secret).hexdigest(length=8)

    def __repr__(self) -> str:
        return f"Key(id={self.id})"


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of items: the name bound to the API key, and the request's `cache_salt`."""

    name: str = ""
    salt: str | None = None

    @property
    def parts(self) -> tuple[bytes, bytes]:
        """The tenant's two parts of every hash, to be framed. No two tenants have the same parts (threats S12).

        A missing salt and an empty salt are different tenants: a salt that is present has a byte before it. An unpaired
        surrogate raises `UnicodeEncodeError`.
        """
        return self.name.encode(), b"" if self.salt is None else b"\x01" + self.salt.encode()

    @property
    def prefix_salt(self) -> str | None:
        """The salt that separates the tenant's prefixes in an engine's cache; no two tenants share one (threats S12).

        The unnamed tenant uses the request's own salt, as in vLLM alone, unless that salt looks like one made here.
        """
        if not self.name and (self.salt is None or not self.salt.startswith("\0")):
            return self.salt
        return f"\0{self.name}\n" if self.salt is None else f"\0{self.name}\n\1{self.salt}"


def tenant_name(prefix_salt: str | None) -> str:
    """The name of the tenant whose prefix salt this is, whatever salt its requests have; "" is the unnamed one."""
    if prefix_salt is None or not prefix_salt.startswith("\0"):
        return ""
    return prefix_salt[1:].partition("\n")[0]


class Identity:
    """Computes the digests of items that differ only in their media.

    Everything except the media is hashed once: with 32,768 items in a request, a digest takes 3 µs instead of 20.
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
        """Return the digest of one item."""
        hasher = self._shared.copy()
        hasher.update(_length(media))
        hasher.update(media)
        return Digest(hasher.digest())


def frame(parts: Iterable[bytes | memoryview]) -> Iterable[bytes | memoryview]:
    """Put each part's length before the part. Different lists of parts never give the same concatenation."""
    for part in parts:
        yield _length(part)
        yield part


def hash_parts(parts: Iterable[bytes | memoryview], key: Key | None = None) -> blake3:
    """Return the hash of the framed parts, keyed if `key` is passed."""
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
    """Return the digest of one item.

    `fingerprint` is the processor's (`semel.processing`), as a worker's contract states it. `options` are the request's
    `mm_processor_kwargs`, which must be JSON values. The order of their keys does not matter.
    """
    shared = Identity(key=key, modality=modality, fingerprint=fingerprint, options=options, tenant=tenant)
    return shared.digest(media)


def _length(part: bytes | memoryview) -> bytes:
    return memoryview(part).nbytes.to_bytes(_LENGTH_BYTES, "little")
