"""The in-process cache: features where preprocessing left them, bounded in bytes."""

from __future__ import annotations

from semel.cache.protocol import SMALLEST_BYTES
from semel.core import Digest, Feature, LruMap

__all__ = ["LruCache"]


class LruCache:
    """Holds the features themselves: what is put is what is got."""

    def __init__(self, capacity_bytes: int) -> None:
        self._features: LruMap[Digest, Feature] = LruMap(capacity_bytes, _charge)
        self._evictions = 0

    @property
    def capacity(self) -> int:
        """The most bytes it may hold."""
        return self._features.max_weight

    @property
    def nbytes(self) -> int:
        """The bytes of the features it holds."""
        return self._features.weight

    @property
    def evictions(self) -> int:
        """How many features it has given up so far to make room."""
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
        """Hold a feature, unless it is larger than the cache; the first under a digest stays."""
        if (cached := self.get(digest)) is not None:
            return cached
        self._evictions += len(self._features.put(digest, feature))
        return feature

    def discard(self, digest: Digest) -> None:
        """Give up a feature, if it is held."""
        self._features.pop(digest)

    def clear(self) -> None:
        """Give up every feature."""
        self._features.clear()

    def close(self) -> None:
        """Give up everything for good."""
        self._features = LruMap(0, _charge)


def _charge(feature: Feature) -> int:
    return max(feature.nbytes, SMALLEST_BYTES)
