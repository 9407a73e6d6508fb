"""Encoder outputs in the host's memory: which are there, in which blocks, and which go first.

A slot is *reserved* for an output that is being copied, then *filled*, and *pinned* while copies of it are on their
way to a device. Only a filled slot may be loaded, and blocks are free again only when nobody writes or reads them:
`free + reserved + filled == blocks`, with the pinned ones among the filled.

What is forgotten (the weights changed, the output was wrong) is not found from then on; its blocks stay taken until
the copies that use them have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from semel.encoder.eviction import CostAware, Entry, Eviction, Key
from semel.encoder.extents import Extent, FreeExtents

__all__ = ["HostCache", "HostCacheCounts", "Slot"]


class Slot(Entry):
    """The blocks of one encoder output. As an entry its size is in blocks."""

    __slots__ = ("extents", "form", "is_filled", "is_forgotten", "pins", "rows", "transfer")

    def __init__(self, key: Key, rows: int, extents: tuple[Extent, ...]) -> None:
        super().__init__(key, sum(count for _, count in extents), rows)
        self.rows = rows
        """The embeddings of the output."""
        self.extents = extents
        self.form: Hashable = None
        """A note of the process with the tensors when the output was copied: it gets it back with each load."""
        self.is_filled = False
        self.is_forgotten = False
        self.pins = 0
        self.transfer = 0
        """The number of the copy that fills it: no other slot has had it."""

    def __repr__(self) -> str:
        state = "forgotten" if self.is_forgotten else "filled" if self.is_filled else "reserved"
        return f"Slot({self.key!r}, {self.size} blocks, {state}, {self.pins} pins)"


@dataclass(slots=True)
class HostCacheCounts:
    """Running totals."""

    evictions: int = 0
    full: int = 0
    """Outputs that were not taken, because everything else was in use or they are larger than the host cache."""


class HostCache:
    """Bookkeeping of one region: it has keys and blocks, others have the memory."""

    def __init__(self, blocks: int, eviction: Eviction | None = None) -> None:
        self.blocks = blocks
        self.counts = HostCacheCounts()
        self.reserved = 0
        """Blocks that are being written."""
        self.pinned = 0
        """Blocks that are being read."""
        self.on_gone: Callable[[Slot], None] = lambda _: None
        """Called with a filled slot that is not found any more, before its blocks are free. Not by `forget_all`."""
        self._eviction: Eviction = eviction or CostAware()
        self._extents = FreeExtents(blocks)
        self._slots: dict[Key, Slot] = {}
        self._reclaimable = 0

    @property
    def free(self) -> int:
        """Blocks of no slot."""
        return self._extents.free

    def filled(self, key: Key) -> Slot | None:
        """Return the slot of an output that may be loaded; None if there is none."""
        slot = self._slots.get(key)
        return slot if slot is not None and slot.is_filled else None

    def reserve(self, key: Key, rows: int, blocks: int) -> Slot | None:
        """Reserve a slot for an output. None if there is one for the key, or no room even if others are evicted."""
        if key in self._slots:
            return None
        if blocks > self.free + self._reclaimable:
            self.counts.full += 1
            return None
        while self.free < blocks:
            self._evict()
        slot = Slot(key, rows, self._extents.take(blocks))
        self._slots[key] = slot
        self.reserved += slot.size
        self._eviction.show(slot)
        return slot

    def fill(self, slot: Slot, form: Hashable = None) -> None:
        """Mark a reserved slot as filled: all its bytes are there."""
        slot.form = form
        slot.is_filled = True
        self.reserved -= slot.size
        self._settle(slot)

    def cancel(self, slot: Slot) -> None:
        """Free a reserved slot that nobody writes or will write."""
        self.reserved -= slot.size
        if not slot.is_forgotten:
            del self._slots[slot.key]
        self._extents.give_back(slot.extents)

    def pin(self, slot: Slot) -> None:
        """Protect a filled slot while it is read."""
        if not slot.pins:
            self.pinned += slot.size
            self._reclaimable -= slot.size
        slot.pins += 1
        self._eviction.show(slot)

    def unpin(self, slot: Slot) -> None:
        """End one reader's use of a slot."""
        slot.pins -= 1
        if not slot.pins:
            self.pinned -= slot.size
            self._settle(slot)

    def forget(self, key: Key) -> None:
        """Do not find the output any more. Its blocks are free as soon as no copy uses them."""
        slot = self._slots.get(key)
        if slot is None:
            return
        if slot.is_filled:
            self.on_gone(slot)
        self._forget(slot)

    def forget_all(self) -> None:
        """Do not find anything any more."""
        for slot in tuple(self._slots.values()):
            self._forget(slot)
        self._eviction.clear()

    def _forget(self, slot: Slot) -> None:
        del self._slots[slot.key]
        slot.is_forgotten = True
        if slot.is_filled and not slot.pins:
            self._eviction.discard(slot)
            self._reclaimable -= slot.size
            self._extents.give_back(slot.extents)

    def _settle(self, slot: Slot) -> None:
        """Free a slot that nobody uses, or let it be evicted."""
        if slot.is_forgotten:
            self._extents.give_back(slot.extents)
        else:
            self._eviction.admit(slot)
            self._reclaimable += slot.size

    def _evict(self) -> None:
        slot = self._eviction.pop()
        assert isinstance(slot, Slot)
        self.on_gone(slot)
        del self._slots[slot.key]
        self._reclaimable -= slot.size
        self.counts.evictions += 1
        self._extents.give_back(slot.extents)
