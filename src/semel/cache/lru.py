"""In-process caches: features where preprocessing left them, bounded in bytes, and layouts."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar

from semel.cache.protocol import SMALLEST_BYTES
from semel.core import Digest, Feature, Layout, LruMap
from semel.fairness.tenant_lru import TenantLru

__all__ = ["LayoutCache", "LruCache", "NoCache"]

_K = TypeVar("_K", bound=Hashable)


class _Entry(NamedTuple):
    feature: Feature
    tenant: str
    nbytes: int


class LruCache:
    """A cache of the feature objects themselves: `get` returns what was `put`."""

    def __init__(self, capacity_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._room: TenantLru[Digest] = TenantLru(capacity_bytes, clock)
        self._entries: dict[Digest, _Entry] = {}
        self.evictions = 0

    @property
    def capacity(self) -> int:
        """Maximum size in bytes."""
        return self._room.shares.capacity

    @property
    def nbytes(self) -> int:
        """Bytes of the cached features."""
        return self._room.shares.total

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, digest: object) -> bool:
        return digest in self._entries

    def __repr__(self) -> str:
        return f"LruCache({len(self)} features, {self.nbytes:,} of {self.capacity:,} bytes)"

    def nbytes_of(self, tenant: str) -> int:
        """Bytes of a tenant's features."""
        return self._room.shares[tenant]

    def get(self, digest: Digest) -> Feature | None:
        """Return the feature, which becomes the most recently used."""
        entry = self._entries.get(digest)
        if entry is None:
            return None
        self._room.use(entry.tenant, digest)
        return entry.feature

    def put(self, digest: Digest, feature: Feature, *, tenant: str = "") -> Feature:
        """Cache a feature, unless it is larger than the cache. The first feature under a digest stays."""
        if (cached := self.get(digest)) is not None:
            return cached
        nbytes = max(feature.nbytes, SMALLEST_BYTES)
        if not self._make_room(tenant, nbytes):
            return feature
        self._room.charge(tenant, nbytes)
        self._room.add(tenant, digest)
        self._entries[digest] = _Entry(feature, tenant, nbytes)
        return feature

    def discard(self, digest: Digest) -> None:
        """Remove a feature, if cached."""
        entry = self._entries.pop(digest, None)
        if entry is not None:
            self._room.remove(entry.tenant, digest)
            self._room.release(entry.tenant, entry.nbytes)

    def clear(self) -> None:
        """Remove every feature."""
        for digest in list(self._entries):
            self.discard(digest)

    def close(self) -> None:
        """Remove every feature, and cache nothing from now on."""
        self._entries.clear()
        self._room = TenantLru(0)

    def _make_room(self, tenant: str, nbytes: int) -> bool:
        """Evict what has to go; nothing if there would be no room in the end."""
        if self._room.shares.fits(nbytes):
            return True
        if not self._room.can_have(tenant, nbytes):
            return False
        victims = self._room.victims(tenant, nbytes)
        while not self._room.shares.fits(nbytes):
            self.discard(next(victims))
            self.evictions += 1
        return True


class NoCache(LruCache):
    """A cache of nothing: every feature is used as passed (D4)."""

    def __init__(self) -> None:
        super().__init__(0)


class LayoutCache(LruMap[_K, Layout]):
    """A bounded map from keys to layouts: all that a prompt needs of an item. One thread owns it.

    Its weight is in tokens. A layout is kept as its runs: at most 12 bytes per token, and mostly 150 bytes in all.
    """

    __slots__ = ()

    def __init__(self, max_entries: int = 65_536, max_tokens: int = 16 << 20) -> None:
        super().__init__(max_tokens, len, max_entries=max_entries)

    def put(self, key: _K, value: Layout) -> list[_K]:
        """Store a layout, unless it is larger than the cache. The first layout under a key stays."""
        return super().put(key, value) if self.get(key) is None else []
