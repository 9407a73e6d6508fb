"""The protocol of feature caches: what every kind promises, whatever it keeps its bytes in.

A cache is never wrong, only incomplete: features are immutable and named by their digests, so the one thing a cache can
do to a request is not to hold its feature. It belongs to one thread. `tests/cache/test_contract.py` holds every kind to
what stands here.
"""

from __future__ import annotations

from typing import Final, Protocol

from semel.core import Digest, Feature

__all__ = ["SMALLEST_BYTES", "Cache"]

SMALLEST_BYTES: Final = 64
"""What even an empty feature is charged, so that a bound in bytes is one in entries too."""


class Cache(Protocol):
    """Features by digest, bounded in bytes; the least recently used go first.

    `nbytes <= capacity` holds at all times. A feature that comes out equals the one that went in: in modality, names,
    dtypes, shapes, layout and bytes. Its memory stays as it is for as long as anybody refers to one of its buffers,
    whatever happens to the cache.
    """

    @property
    def capacity(self) -> int:
        """The most bytes it may hold."""
        ...

    @property
    def nbytes(self) -> int:
        """The bytes of the features it holds."""
        ...

    @property
    def evictions(self) -> int:
        """How many features it has given up so far to make room."""
        ...

    def __len__(self) -> int: ...

    def __contains__(self, digest: object) -> bool:
        """Whether a feature is held; looking changes no order."""
        ...

    def get(self, digest: Digest) -> Feature | None:
        """The feature, which becomes the most recently used."""
        ...

    def put(self, digest: Digest, feature: Feature) -> Feature:
        """Hold a feature; returns the one to use from now on.

        That is the one held: another object, perhaps over other memory, and the earlier one if the digest was there.
        Where it cannot be held, because it is larger than the cache or everything is in use, it is the one given: a
        lack of room never raises.
        """
        ...

    def discard(self, digest: Digest) -> None:
        """Give up a feature, if it is held."""
        ...

    def clear(self) -> None:
        """Give up every feature."""
        ...

    def close(self) -> None:
        """Give up everything for good; from now on it holds nothing. Features that are out stay readable."""
        ...
