"""The in-process cache: features where preprocessing left them, bounded in bytes."""

from __future__ import annotations

from collections import OrderedDict

from semel.cache.protocol import SMALLEST_BYTES
from semel.core import Digest, Feature

__all__ = ["LruCache"]


class LruCache:
    """Holds the features themselves: what is put is what is got."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._features: OrderedDict[Digest, Feature] = OrderedDict()
        self._nbytes = 0
        self._evictions = 0

    @property
    def capacity(self) -> int:
        """The most bytes it may hold."""
        return self._capacity

    @property
    def nbytes(self) -> int:
        """The bytes of the features it holds."""
        return self._nbytes

    @property
    def evictions(self) -> int:
        """How many features it has given up so far to make room."""
        return self._evictions

    def __len__(self) -> int:
        return len(self._features)

    def __contains__(self, digest: object) -> bool:
        return digest in self._features

    def __repr__(self) -> str:
        return f"LruCache({len(self)} features, {self._nbytes:,} of {self._capacity:,} bytes)"

    def get(self, digest: Digest) -> Feature | None:
        """The feature, which becomes the most recently used."""
        feature = self._features.get(digest)
        if feature is not None:
            self._features.move_to_end(digest)
        return feature

    def put(self, digest: Digest, feature: Feature) -> Feature:
        """Hold a feature, unless it is larger than the cache; the first under a digest stays."""
        if (cached := self.get(digest)) is not None:
            return cached
        nbytes = _charge(feature)
        if nbytes > self._capacity:
            return feature
        while self._nbytes + nbytes > self._capacity:
            _, oldest = self._features.popitem(last=False)
            self._nbytes -= _charge(oldest)
            self._evictions += 1
        self._features[digest] = feature
        self._nbytes += nbytes
        return feature

    def discard(self, digest: Digest) -> None:
        """Give up a feature, if it is held."""
        if (feature := self._features.pop(digest, None)) is not None:
            self._nbytes -= _charge(feature)

    def clear(self) -> None:
        """Give up every feature."""
        self._features.clear()
        self._nbytes = 0

    def close(self) -> None:
        """Give up everything for good."""
        self.clear()
        self._capacity = 0


def _charge(feature: Feature) -> int:
    return max(feature.nbytes, SMALLEST_BYTES)
