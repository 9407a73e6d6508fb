"""The protocol of feature caches: the guarantees of every implementation.

A cache is never wrong, only incomplete. Features are immutable and named by their digests, so a cache can affect a
request only by a miss. One thread owns a cache. `tests/cache/test_contract.py` checks every implementation against this
protocol.
"""

from __future__ import annotations

from typing import Final, Protocol

from semel.core import Digest, Feature

__all__ = ["SMALLEST_BYTES", "Cache"]

SMALLEST_BYTES: Final = 64
"""Minimum charge per feature, even an empty one, so that a limit in bytes also limits the entries."""


class Cache(Protocol):
    """Features by digest, bounded in bytes; evicts the least recently used of the tenant that has to yield (`room`).

    A tenant that is alone may have all of it. While others use it too, none of them loses what is within its share.
    `nbytes <= capacity` holds at all times. A feature that comes out equals the one that went in: in modality, names,
    dtypes, shapes, layout and bytes. Its memory does not change while any reference to one of its buffers exists,
    whatever happens to the cache.
    """

    @property
    def capacity(self) -> int:
        """Maximum size in bytes."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the cached features."""
        ...

    @property
    def evictions(self) -> int:
        """Number of features evicted so far to make room."""
        ...

    def nbytes_of(self, tenant: str) -> int:
        """Return the bytes that a tenant has of the cache."""
        ...

    def __len__(self) -> int: ...

    def __contains__(self, digest: object) -> bool:
        """Return whether a feature is cached; does not change the order."""
        ...

    def get(self, digest: Digest) -> Feature | None:
        """Return the feature, which becomes the most recently used."""
        ...

    def put(self, digest: Digest, feature: Feature, *, tenant: str = "") -> Feature:
        """Cache a feature, in the room of a tenant. Returns the feature to use from now on.

        That is the cached one: another object, perhaps over other memory, and the earlier one if the digest was cached.
        If the feature cannot be cached, because it is larger than the room that the tenant can have or everything is in
        use, it is the argument. A lack of room never raises.
        """
        ...

    def discard(self, digest: Digest) -> None:
        """Remove a feature, if cached."""
        ...

    def clear(self) -> None:
        """Remove every feature."""
        ...

    def close(self) -> None:
        """Close the cache, which is empty from now on. Features that callers still use stay readable."""
        ...
