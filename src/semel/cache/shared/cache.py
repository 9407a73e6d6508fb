"""The cache in shared memory: one copy of each feature, written by its owner, read in place by local processes.

One process owns the segment and allocates its ranges. One rule decides how long a range stays unchanged: it is free
again when the last buffer over it is gone. The cache refers to its features, a lease to the feature that another
process reads, a request or a socket to the buffers that it sends. Eviction drops one of these references. Therefore
bytes under a lease never change, and an entry that stays in use costs its own bytes and nothing else. A range counts
as its tenant's until it is free.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Final, NamedTuple, Self

from semel.cache.shared.arena import Arena, align
from semel.cache.shared.packing import borrowed_feature, copy_into, packed_bytes, tensor_heads
from semel.cache.shared.segment import Lease, Segment
from semel.core import Digest, Feature
from semel.fairness.tenant_lru import TenantLru

__all__ = ["Reservation", "SharedCache"]

_MAX_UNCHECKED: Final = 8
_CHECK_BYTES: Final = 1_024
"""Checking whether there can be a range in one piece takes as long, per feature, as writing so many bytes."""


class Reservation:
    """A range to write a feature into. It is freed with this object and the last buffer over it."""

    __slots__ = ("_exporter", "nbytes", "offset")

    def __init__(self, exporter: ctypes.Array[ctypes.c_ubyte], offset: int, nbytes: int) -> None:
        self._exporter: ctypes.Array[ctypes.c_ubyte] | None = exporter
        self.offset = offset
        self.nbytes = nbytes

    def __repr__(self) -> str:
        return f"Reservation({self.nbytes:,} bytes from {self.offset:,})"

    def view(self) -> memoryview:
        """Return the range, writable."""
        if self._exporter is None:
            raise ValueError(f"{self!r} has been released")
        return memoryview(self._exporter).cast("B")

    def release(self) -> None:
        """Free the range."""
        self._exporter = None


@dataclass(slots=True, eq=False)
class _Entry:
    digest: Digest
    feature: Feature
    tenant: str
    offset: int
    nbytes: int
    view: memoryview
    """Over the whole range: a feature may have no tensor that would keep the range alive."""
    leases: int = 0


class _Range(NamedTuple):
    """An allocated range: its tenant, its size, and the object that all buffers over it refer to."""

    tenant: str
    nbytes: int
    exporter: weakref.ref[ctypes.Array[ctypes.c_ubyte]]


class SharedCache:
    """A cache whose features are in a segment, and the owner of that segment.

    One thread owns it, as with every cache. Any thread may drop buffers over its memory.
    """

    def __init__(self, segment: Segment, clock: Callable[[], float] = time.monotonic) -> None:
        self.segment = segment
        self._arena = Arena(segment.size)
        self._room: TenantLru[Digest] = TenantLru(self._arena.size, clock)
        # Evictable entries, and leased ones, whose eviction would free nothing.
        self._idle: dict[Digest, _Entry] = {}
        self._leased: dict[Digest, _Entry] = {}
        self._leases: dict[int, _Entry] = {}
        self._lease_ids = count(1)
        self._stuck: set[int] = set()
        """Allocated ranges that no eviction frees: leased, reserved, or in use after an eviction."""
        self._ranges: dict[int, _Range] = {}
        """All allocated ranges, by offset."""
        self._base = ctypes.addressof(ctypes.c_ubyte.from_buffer(segment.memory))
        self._freed: deque[int] = deque()
        """Finalizers run in any thread, at any point: they only append here."""
        self.nbytes = 0
        """Bytes of the ranges of the cached features."""
        self.evictions = 0
        self._closed = False

    @classmethod
    def create(cls, capacity_bytes: int, clock: Callable[[], float] = time.monotonic) -> Self:
        """Create a cache over a new segment of this size."""
        return cls(Segment(capacity_bytes), clock)

    @property
    def capacity(self) -> int:
        """Maximum size in bytes: the segment's size."""
        return self.segment.size

    @property
    def occupied(self) -> int:
        """Bytes of all allocated ranges, including those that are reserved, or evicted and still being read."""
        self._collect()
        return self._arena.used

    @property
    def leases(self) -> int:
        """Number of open leases."""
        return len(self._leases)

    def __len__(self) -> int:
        return len(self._idle) + len(self._leased)

    def __contains__(self, digest: object) -> bool:
        return digest in self._idle or digest in self._leased

    def __repr__(self) -> str:
        return f"SharedCache({len(self)} features, {self.nbytes:,} of {self.capacity:,} bytes, {self.leases} leases)"

    def nbytes_of(self, tenant: str) -> int:
        """Return the bytes of a tenant's ranges, including those that are reserved, or evicted and still being read."""
        self._collect()
        return self._room.shares[tenant]

    def get(self, digest: Digest) -> Feature | None:
        """Return the feature, which becomes the most recently used."""
        entry = self._find(digest)
        return None if entry is None else entry.feature

    def put(self, digest: Digest, feature: Feature, *, tenant: str = "") -> Feature:
        """Copy a feature into the segment. Returns the copy, or the argument if there is no room.

        A feature that is already in the segment is cached without a copy.
        """
        if (cached := self.adopt(digest, feature)) is not None:
            return cached
        heads = tensor_heads(feature)
        reservation = self.reserve(packed_bytes(heads), tenant=tenant)
        if reservation is None:
            return feature
        self.segment.populate(reservation.offset + reservation.nbytes)
        view = reservation.view()
        stored = borrowed_feature(view, feature.modality, heads, feature.layout, feature.origin)
        # The copy comes last: it evicts everything else from the CPU's caches, so code after it is slow.
        copy_into(view, feature)
        return self._hold(digest, stored, reservation.offset, view)

    def adopt(self, digest: Digest, feature: Feature) -> Feature | None:
        """Cache a feature that is already in the segment, without a copy; None if it is elsewhere.

        It was copied into a reservation, or evicted and is still in use. If the digest is cached, returns the cached
        feature.
        """
        if (cached := self.get(digest)) is not None:
            return cached
        if (place := self._place_of(feature)) is None:
            return None
        return self._hold(digest, feature, *place)

    def reserve(self, nbytes: int, *, tenant: str = "") -> Reservation | None:
        """Reserve a range of at least this size for writing; None if there is no room even after eviction.

        The range, and the feature that is written to it, count as the tenant's.
        """
        if self._closed:
            return None
        nbytes = align(max(nbytes, 1))
        offset = self._allocate(nbytes, tenant)
        if offset is None:
            return None
        self._room.charge(tenant, nbytes)
        self._stuck.add(offset)
        exporter = _bytes_type(nbytes).from_buffer(self.segment.memory, offset)
        weakref.finalize(exporter, self._freed.append, offset).atexit = False
        self._ranges[offset] = _Range(tenant, nbytes, weakref.ref(exporter))
        return Reservation(exporter, offset, nbytes)

    def lease(self, digest: Digest) -> Lease | None:
        """Let another process read a feature until it returns the lease; None if the feature is not cached."""
        entry = self._find(digest)
        if entry is None:
            return None
        if not entry.leases:
            self._leased[digest] = self._idle.pop(digest)
            self._room.remove(entry.tenant, digest)
            self._stuck.add(entry.offset)
        entry.leases += 1
        lease = Lease(next(self._lease_ids), self.segment.id, entry.offset, entry.nbytes)
        self._leases[lease.id] = entry
        return lease

    def give_back(self, lease_id: int) -> None:
        """End a lease. Ending it twice is not an error."""
        entry = self._leases.pop(lease_id, None)
        if entry is None:
            return
        entry.leases -= 1
        if not entry.leases and self._leased.get(entry.digest) is entry:
            self._idle[entry.digest] = self._leased.pop(entry.digest)
            self._room.add(entry.tenant, entry.digest)
            self._stuck.discard(entry.offset)

    def discard(self, digest: Digest) -> None:
        """Remove a feature, if cached; its leases stay valid."""
        entry = self._idle.pop(digest, None) or self._leased.pop(digest, None)
        if entry is not None:
            self._drop(entry)

    def clear(self) -> None:
        """Remove every feature; leases stay valid."""
        for digest in [*self._idle, *self._leased]:
            self.discard(digest)

    def give_back_memory(self) -> bool:
        """Give the memory back to the system until it is needed again; False if any of it is in use."""
        self._collect()
        if self._ranges:
            return False
        self.segment.forget(self.segment.size)
        return True

    def close(self) -> None:
        """Close the cache. Leased and exported memory stays readable: its bytes are never reused."""
        self._closed = True
        self.clear()
        self._leases.clear()
        self.segment.close()

    def _hold(self, digest: Digest, feature: Feature, offset: int, view: memoryview) -> Feature:
        if not self._closed:
            tenant = self._ranges[offset].tenant
            self._idle[digest] = _Entry(digest, feature, tenant, offset, view.nbytes, view)
            self._room.add(tenant, digest)
            self._stuck.discard(offset)
            self.nbytes += view.nbytes
        return feature

    def _place_of(self, feature: Feature) -> tuple[int, memoryview] | None:
        """Return the range of a feature in the segment that has no entry; None if the feature is elsewhere."""
        exporter = next((tensor.data.obj for tensor in feature.tensors.values() if tensor.nbytes), None)
        if not isinstance(exporter, ctypes.Array):
            return None
        offset = ctypes.addressof(exporter) - self._base
        its = self._ranges.get(offset)
        if its is None or its.exporter() is not exporter or offset not in self._stuck:
            return None
        if any(entry.offset == offset for entry in self._leased.values()):  # under another digest
            return None
        return offset, memoryview(exporter).cast("B")

    def _find(self, digest: Digest) -> _Entry | None:
        if (entry := self._idle.get(digest)) is not None:
            self._room.use(entry.tenant, digest)
        elif (entry := self._leased.get(digest)) is not None:
            self._room.touch(entry.tenant)
        return entry

    def _allocate(self, nbytes: int, tenant: str) -> int | None:
        """Allocate a range, evicting as much as needed.

        Evicts nothing if what is in use leaves no such range, or if the tenant cannot have so much. If it can, but what
        others are entitled to leaves no range in one piece, little more is evicted than as many bytes.
        """
        self._collect()
        offset = self._arena.allocate(nbytes)
        if offset is not None or not self._room.can_have(tenant, nbytes):
            return offset
        victims = self._room.victims(tenant, nbytes)
        considered, unchecked = -1, min(len(self) * _CHECK_BYTES // nbytes, _MAX_UNCHECKED)
        while offset is None:
            if considered != len(self._stuck):
                if self._arena.largest_gap_between(self._stuck) < nbytes:
                    return None
                considered = len(self._stuck)
            if self._room.shares.fits(nbytes) and self._room.has_others(tenant):  # there is room, but not in one piece
                if unchecked == 0 and not self._can_be_in_one_piece(nbytes, tenant):
                    return None
                unchecked -= 1
            if (victim := next(victims, None)) is None:
                return None
            self._evict(victim)
            self._collect()
            offset = self._arena.allocate(nbytes)
        return offset

    def _can_be_in_one_piece(self, nbytes: int, tenant: str) -> bool:
        """Return whether there is a range between what is in use and what other tenants are entitled to."""
        protected = {self._idle[digest].offset for digest in self._room.protected(tenant, nbytes)}
        return self._arena.largest_gap_between(protected | self._stuck) >= nbytes

    def _evict(self, digest: Digest) -> None:
        self._drop(self._idle.pop(digest))
        self.evictions += 1

    def _drop(self, entry: _Entry) -> None:
        self._room.remove(entry.tenant, entry.digest)
        self._stuck.add(entry.offset)  # until its last buffer is gone, possibly now
        self.nbytes -= entry.nbytes

    def _collect(self) -> None:
        while self._freed:
            offset = self._freed.popleft()
            self._arena.free(offset)
            freed = self._ranges.pop(offset)
            self._room.release(freed.tenant, freed.nbytes)
            self._stuck.discard(offset)


@lru_cache(maxsize=256)
def _bytes_type(nbytes: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    # Creating the type takes 17 µs, and the features of one service have few sizes.
    return ctypes.c_ubyte * nbytes
