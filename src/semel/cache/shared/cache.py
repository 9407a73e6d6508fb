"""The cache in shared memory: one copy, written by whoever made it, read by local processes where it lies.

One process owns the segment and decides what lies where. How long a range stays as it is follows from one rule: it is
free again when the last buffer over it is gone. The cache refers to the features it holds, a lease to the feature that
another process reads, a request or a socket to the buffers it is sending; evicting is letting go of one reference. So
bytes under a lease never change, and an entry that is stuck costs its own bytes and nothing else.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Self

from semel.cache.shared.arena import Arena, align
from semel.cache.shared.packing import Head, borrowed_feature, copy_into, heads_of, packed_bytes
from semel.cache.shared.segment import Lease, Segment
from semel.core import Digest, Feature, Layout, Modality

__all__ = ["Reservation", "SharedCache"]


class Reservation:
    """A range to write a feature into, here or in a child; it is free again when this is gone without a commit.

    Whoever lets a child write into it keeps it until the child has answered or has ended.
    """

    __slots__ = ("_exporter", "nbytes", "offset")

    def __init__(self, exporter: ctypes.Array[ctypes.c_ubyte], offset: int, nbytes: int) -> None:
        self._exporter: ctypes.Array[ctypes.c_ubyte] | None = exporter
        self.offset = offset
        self.nbytes = nbytes

    def __repr__(self) -> str:
        return f"Reservation({self.nbytes:,} bytes from {self.offset:,})"

    def view(self) -> memoryview:
        """The range, to be written to before the commit."""
        if self._exporter is None:
            raise ValueError(f"{self!r} has been committed or released")
        return memoryview(self._exporter).cast("B")

    def release(self) -> None:
        """Let go of the range."""
        self._exporter = None


@dataclass(slots=True, eq=False)
class _Entry:
    digest: Digest
    feature: Feature
    offset: int
    nbytes: int
    view: memoryview
    """Over the whole range: a feature may have no tensor that would keep it."""
    leases: int = 0


class SharedCache:
    """A cache whose features lie in a segment, and the owner of that segment.

    It belongs to one thread, like every cache; buffers over its memory may be let go of in any.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._arena = Arena(segment.size)
        # What may be evicted, least recently used first, and what may not: evicting it would free nothing.
        self._idle: OrderedDict[Digest, _Entry] = OrderedDict()
        self._leased: dict[Digest, _Entry] = {}
        self._leases: dict[int, _Entry] = {}
        self._lease_ids = count(1)
        self._stuck: set[int] = set()
        """The ranges that are out and that no eviction frees: leased, reserved, or in use after an eviction."""
        self._exporters: dict[int, weakref.ref[ctypes.Array[ctypes.c_ubyte]]] = {}
        """What all buffers over a range that is out refer to, by its offset."""
        self._base = ctypes.addressof(ctypes.c_ubyte.from_buffer(segment.memory))
        self._freed: deque[int] = deque()
        """Finalizers run in any thread and in the middle of anything: they only append here."""
        self._nbytes = 0
        self._evictions = 0
        self._closed = False

    @classmethod
    def create(cls, capacity_bytes: int) -> Self:
        """A cache over a new segment of so many bytes."""
        return cls(Segment(capacity_bytes))

    @property
    def capacity(self) -> int:
        """The most bytes it may hold: those of its segment."""
        return self.segment.size

    @property
    def nbytes(self) -> int:
        """The bytes of the ranges of the features it holds."""
        return self._nbytes

    @property
    def occupied(self) -> int:
        """The bytes of all ranges that are out: also of what is reserved, or was given up and is still being read."""
        self._collect()
        return self._arena.used

    @property
    def evictions(self) -> int:
        """How many features it has given up so far to make room."""
        return self._evictions

    @property
    def leases(self) -> int:
        """How many leases are out."""
        return len(self._leases)

    def __len__(self) -> int:
        return len(self._idle) + len(self._leased)

    def __contains__(self, digest: object) -> bool:
        return digest in self._idle or digest in self._leased

    def __repr__(self) -> str:
        return f"SharedCache({len(self)} features, {self._nbytes:,} of {self.capacity:,} bytes, {self.leases} leases)"

    def fileno(self) -> int:
        """The segment's descriptor, for a child that is to write (`pass_fds`)."""
        return self.segment.fileno()

    def get(self, digest: Digest) -> Feature | None:
        """The feature, which becomes the most recently used."""
        entry = self._find(digest)
        return None if entry is None else entry.feature

    def put(self, digest: Digest, feature: Feature) -> Feature:
        """Copy a feature into the segment; returns the one that lies there, or the one given if there is no room.

        One that lies there already is held as it is.
        """
        if (cached := self.adopt(digest, feature)) is not None:
            return cached
        heads = heads_of(feature)
        reservation = self.reserve(packed_bytes(heads))
        if reservation is None:
            return feature
        self.segment.populate(reservation.offset + reservation.nbytes)
        view = reservation.view()
        stored = borrowed_feature(view, feature.modality, heads, feature.layout)
        # The copy comes last: it leaves nothing of ours in the processor's caches, and what follows it is slow.
        copy_into(view, feature)
        return self._hold(digest, stored, reservation.offset, view)

    def adopt(self, digest: Digest, feature: Feature) -> Feature | None:
        """Hold a feature that lies in the segment already, where it lies; None if it lies elsewhere.

        A child has written it, or it was evicted and is still in use. If the digest is held, it is the one held.
        """
        if (cached := self.get(digest)) is not None:
            return cached
        if (place := self._place_of(feature)) is None:
            return None
        return self._hold(digest, feature, *place)

    def reserve(self, nbytes: int) -> Reservation | None:
        """A range to write to, of at least so many bytes; None if there is no room even after evicting."""
        if self._closed:
            return None
        nbytes = align(max(nbytes, 1))
        offset = self._allocate(nbytes)
        if offset is None:
            return None
        self._stuck.add(offset)
        exporter = _bytes_type(nbytes).from_buffer(self.segment.memory, offset)
        weakref.finalize(exporter, self._freed.append, offset).atexit = False
        self._exporters[offset] = weakref.ref(exporter)
        return Reservation(exporter, offset, nbytes)

    def commit(
        self, digest: Digest, reservation: Reservation, modality: Modality, heads: Sequence[Head], layout: Layout
    ) -> Feature:
        """Hold what has been written to a reservation, without a copy; the first under a digest stays.

        The reservation is used up. A `ProtocolError` if the tensors do not fit into it.
        """
        view = reservation.view()
        reservation.release()
        if (cached := self.get(digest)) is not None:
            return cached
        return self._hold(digest, borrowed_feature(view, modality, heads, layout), reservation.offset, view)

    def lease(self, digest: Digest) -> Lease | None:
        """Let another process read a feature until the lease is given back; None if it is not held."""
        entry = self._find(digest)
        if entry is None:
            return None
        if not entry.leases:
            self._leased[digest] = self._idle.pop(digest)
            self._stuck.add(entry.offset)
        entry.leases += 1
        lease = Lease(next(self._lease_ids), self.segment.id, entry.offset, entry.nbytes)
        self._leases[lease.id] = entry
        return lease

    def give_back(self, lease_id: int) -> None:
        """End a lease; one that has ended already is no error."""
        entry = self._leases.pop(lease_id, None)
        if entry is None:
            return
        entry.leases -= 1
        if not entry.leases and self._leased.get(entry.digest) is entry:
            self._idle[entry.digest] = self._leased.pop(entry.digest)
            self._stuck.discard(entry.offset)

    def discard(self, digest: Digest) -> None:
        """Give up a feature, if it is held; leases on it stay good."""
        entry = self._idle.pop(digest, None) or self._leased.pop(digest, None)
        if entry is not None:
            self._drop(entry)

    def clear(self) -> None:
        """Give up every feature; leases stay good."""
        for digest in [*self._idle, *self._leased]:
            self.discard(digest)

    def close(self) -> None:
        """Give up everything for good. What is leased or exported stays readable: its bytes are never reused."""
        self._closed = True
        self.clear()
        self._leases.clear()
        self.segment.close()

    def _hold(self, digest: Digest, feature: Feature, offset: int, view: memoryview) -> Feature:
        if not self._closed:
            self._idle[digest] = _Entry(digest, feature, offset, view.nbytes, view)
            self._stuck.discard(offset)
            self._nbytes += view.nbytes
        return feature

    def _place_of(self, feature: Feature) -> tuple[int, memoryview] | None:
        """The range that a feature lies in though no entry has it; None if it lies elsewhere."""
        exporter = next((tensor.data.obj for tensor in feature.tensors.values() if tensor.nbytes), None)
        if not isinstance(exporter, ctypes.Array):
            return None
        offset = ctypes.addressof(exporter) - self._base
        its = self._exporters.get(offset)
        if its is None or its() is not exporter or offset not in self._stuck:
            return None
        if any(entry.offset == offset for entry in self._leased.values()):  # under another digest
            return None
        return offset, memoryview(exporter).cast("B")

    def _find(self, digest: Digest) -> _Entry | None:
        entry = self._idle.get(digest)
        if entry is None:
            return self._leased.get(digest)
        self._idle.move_to_end(digest)
        return entry

    def _allocate(self, nbytes: int) -> int | None:
        """A free range, after evicting as much as it takes; nothing is evicted in vain."""
        self._collect()
        offset = self._arena.allocate(nbytes)
        considered = -1
        while offset is None and self._idle:
            if considered != len(self._stuck):
                if self._arena.room_beside(self._stuck) < nbytes:
                    return None
                considered = len(self._stuck)
            self._evict()
            self._collect()
            offset = self._arena.allocate(nbytes)
        return offset

    def _evict(self) -> None:
        _, entry = self._idle.popitem(last=False)
        self._drop(entry)
        self._evictions += 1

    def _drop(self, entry: _Entry) -> None:
        self._stuck.add(entry.offset)  # until its last buffer is gone, which may be now
        self._nbytes -= entry.nbytes

    def _collect(self) -> None:
        while self._freed:
            offset = self._freed.popleft()
            self._arena.free(offset)
            del self._exporters[offset]
            self._stuck.discard(offset)


@lru_cache(maxsize=256)
def _bytes_type(nbytes: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    # Making the type takes 17 µs, and features of one service have few sizes.
    return ctypes.c_ubyte * nbytes
