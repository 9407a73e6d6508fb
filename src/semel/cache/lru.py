"""The in-process cache: features where preprocessing left them, bounded in bytes."""

from __future__ import annotations

from semel.cache.protocol import SMALLEST_BYTES
from semel.core import Digest, Feature, LruMap

__all__ = ["LruCache"]


class LruCache:
    """Caches the feature objects themselves: `get` returns what was `put`."""

    def __init__(self, capacity_bytes: int) -> None:
        self._features: LruMap[Digest, Feature] = LruMap(capacity_bytes, _charge)
        self._evictions = 0

    @property
    def capacity(self) -> int:
        """Maximum size in bytes."""
        return self._features.max_weight

    @property
    def nbytes(self) -> int:
        """Bytes of the cached features."""
        return self._features.weight

    @property
    def evictions(self) -> int:
        """Number of features evicted so far to make room."""
        return self._evictions

    def __len__(self) -> int:
        return len(self._features)

    def __contains__(self, digest: object) -> bool:
        return digest in self._features

    def __repr__(self) -> str:
        return f"LruCache({len(self)} features, {self.nbytes:,} of {self.capacity:,} bytes)"

    def get(self, digest: Digest) -> Feature | None:
        """The feature, which becomes the most recently used."""
        return self._features.get(digest)

    def put(self, digest: Digest, feature: Feature) -> Feature:
        """Cache a feature, unless it is larger than the cache. The first feature under a digest stays."""
        if (cached := self.get(digest)) is not None:
            return cached
        self._evictions += len(self._features.put(digest, feature))
        return feature

    def discard(self, digest: Digest) -> None:
        """Remove a feature, if cached."""
        self._features.pop(digest)

    def clear(self) -> None:
        """Remove every feature."""
        self._features.clear()

    def close(self) -> None:
        """Remove every feature, and cache nothing from now on."""
        self._features = LruMap(0, _charge)


def _charge(feature: Feature) -> int:
    return max(feature.nbytes, SMALLEST_BYTES)
