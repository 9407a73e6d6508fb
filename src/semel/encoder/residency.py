"""Residency of encoder outputs: references of inputs, releases and evictions (requirements B1-B9).

Space is counted in embeddings. Each embedding of the capacity is free, held (its entry has a referrer) or reclaimable
(its entry has none), so `free + held + reclaimable == capacity` always. Time is divided into passes: a scheduler
queries and allocates for one request after another, then calls `settle`, which ends the pass. Until then an allocated
entry is only *planned*: if its planner releases it, the entry was not encoded, and the next referrer takes over the
encode (B7).

Queries change nothing; only allocation evicts. Every operation is O(1) amortised, plus the cost of the eviction policy.
"""

from __future__ import annotations

from collections.abc import Container, KeysView
from dataclasses import dataclass

from semel.encoder.eviction import Entry, Eviction, Key, OldestReleased, Reference

__all__ = ["Counts", "Key", "Reference", "Residency", "Settlement"]


@dataclass(frozen=True, slots=True)
class Settlement:
    """Changes of one pass that the process with the tensors must apply."""

    evicted: tuple[Key, ...]
    """Tensors to drop before the step runs; each eviction is reported once."""
    taken_over: tuple[Reference, ...]
    """Inputs that counted on a resident entry whose planner then released it. This step must encode them."""


@dataclass(slots=True)
class Counts:
    """Running totals. A reference counts when its pass is settled; one released within its pass does not count."""

    queries: int = 0
    """References that began."""
    hits: int = 0
    """References whose encoder output was resident, or planned for another input of the same pass."""
    evictions: int = 0
    """Evicted entries; repeated evictions count each time."""


class Residency:
    """Bookkeeping of one engine's encoder cache: it has keys and sizes, the engine has the tensors."""

    def __init__(self, capacity: int, eviction: Eviction | None = None) -> None:
        self.capacity = capacity
        """In embeddings."""
        self.free = capacity
        """Embeddings that belong to no entry."""
        self.reclaimable = 0
        """Embeddings of entries without a referrer."""
        self.adopted = 0
        """Embeddings whose encode was taken over in this pass: compute that no request planned for."""
        self.counts = Counts()
        self._eviction: Eviction = eviction or OldestReleased()
        self._entries: dict[Key, Entry] = {}
        self._inputs: dict[str, dict[int, Entry]] = {}
        # The changes of this pass:
        self._planned: dict[Key, Entry] = {}
        self._begun: dict[Reference, bool] = {}  # references that began, and whether each was a hit
        self._evicted: dict[Key, bool] = {}  # and whether the tensor goes even if the key is allocated again

    # Queries.

    def size(self, key: Key) -> int | None:
        """Return the embeddings of a resident or planned entry; None if there is no such entry."""
        entry = self._entries.get(key)
        return None if entry is None else entry.size

    def planner(self, key: Key) -> Reference | None:
        """Return the input that encodes the entry in this pass, if any."""
        entry = self._entries.get(key)
        return None if entry is None else entry.planner

    def held_inputs(self, request: str) -> KeysView[int]:
        """Return the inputs of a request that hold an entry: a live view, in O(1) (B4)."""
        return self._inputs.get(request, _NOTHING).keys()

    def evicted(self) -> tuple[Key, ...]:
        """Return the keys evicted in this pass so far.

        An entry that is evicted and then allocated again does not lose its tensor: it is not included (B6), unless it
        was discarded.
        """
        return tuple(key for key, is_wrong in self._evicted.items() if is_wrong or key not in self._entries)

    def claim(self, key: Key) -> int:
        """Return the free or reclaimable embeddings that holding the entry would use."""
        entry = self._entries[key]
        return 0 if entry.referrers else entry.size

    def can_allocate(self, size: int, *, promised: int = 0) -> bool:
        """Return whether there is room for `size` embeddings in addition to `promised` ones. Evicts nothing (B3)."""
        return size + promised <= self.free + self.reclaimable

    # Changes.

    def hold(self, request: str, index: int, key: Key) -> None:
        """Make an input refer to a resident or planned entry."""
        self._refer((request, index), self._entries[key], hit=True)

    def allocate(self, request: str, index: int, key: Key, size: int, *, cost: float | None = None) -> None:
        """Plan an entry for an input, and evict entries to make room. Requires that `can_allocate` is true.

        `cost` is the cost of encoding it, by default `size`. If the key is resident, its entry is held instead.
        """
        reference = (request, index)
        entry = self._entries.get(key)
        if entry is not None:
            self._refer(reference, entry, hit=True)
            return
        if self.free < size:
            self._make_room(size)
        self.free -= size
        entry = Entry(key, size, size if cost is None else cost, reference)
        self._entries[key] = self._planned[key] = entry
        self._refer(reference, entry, hit=False)

    def release(self, request: str, index: int) -> None:
        """Release an input's entry. Does nothing for an input without one: its entry may have been evicted (B4)."""
        inputs = self._inputs.get(request)
        if inputs is None or (entry := inputs.pop(index, None)) is None:
            return
        if not inputs:
            del self._inputs[request]
        reference = (request, index)
        del entry.referrers[reference]
        self._begun.pop(reference, None)
        if entry.planner == reference:
            self._replace_planner(entry)
        elif not entry.referrers:
            self._let_go(entry)

    def release_all(self, request: str) -> None:
        """Release all entries of a request, because it ended, was preempted, or was not scheduled after all."""
        for index in tuple(self.held_inputs(request)):
            self.release(request, index)

    def discard(self, key: Key) -> None:
        """Remove an entry whose tensor is wrong, from all that refer to it; the tensor goes in any case.

        Only between passes, and not for an entry that this pass has planned. Without such an entry nothing changes.
        """
        if (entry := self._entries.get(key)) is not None:
            for request, index in tuple(entry.referrers):
                self.release(request, index)
            if key in self._entries:  # else it was evicted with its last reference
                self._eviction.discard(entry)
                self.reclaimable -= entry.size
                self._evict(entry)
        if key in self._evicted:
            self._evicted[key] = True

    def settle(self, scheduled: Container[str] | None = None) -> Settlement:
        """End the pass: planned entries count as encoded from now on.

        If `scheduled` is passed, references that other requests began in this pass are released first.
        """
        if scheduled is not None:
            for request, index in [reference for reference in self._begun if reference[0] not in scheduled]:
                self.release(request, index)
        taken_over = tuple(e.planner for e in self._planned.values() if e.is_adopted and e.planner is not None)
        self._begun.update(dict.fromkeys(taken_over, False))
        for entry in self._planned.values():
            entry.planner = None
            entry.is_adopted = False
        settlement = Settlement(self.evicted(), taken_over)
        self.counts.queries += len(self._begun)
        self.counts.hits += sum(self._begun.values())
        self._begin_pass()
        return settlement

    def reset(self) -> None:
        """Remove every entry and reference, because the weights change (B8). The totals stay."""
        self.free = self.capacity
        self.reclaimable = 0
        self._eviction.clear()
        self._entries.clear()
        self._inputs.clear()
        self._begin_pass()

    def _begin_pass(self) -> None:
        self.adopted = 0
        self._planned.clear()
        self._begun.clear()
        self._evicted.clear()

    def _refer(self, reference: Reference, entry: Entry, *, hit: bool) -> None:
        referrers = entry.referrers
        if reference in referrers:
            return
        if hit and not referrers:
            self.reclaimable -= entry.size
        referrers[reference] = None
        request, index = reference
        inputs = self._inputs.get(request)
        if inputs is None:
            inputs = self._inputs[request] = {}
        inputs[index] = entry
        self._begun[reference] = hit
        self._eviction.show(entry)

    def _let_go(self, entry: Entry) -> None:
        if self._eviction.admit(entry):
            self.reclaimable += entry.size
        else:
            self._evict(entry)

    def _make_room(self, size: int) -> None:
        while self.free < size:
            entry = self._eviction.pop()
            self.reclaimable -= entry.size
            self._evict(entry)

    def _evict(self, entry: Entry) -> None:
        self._evicted.setdefault(entry.key, False)
        self.counts.evictions += 1
        self._forget(entry)

    def _replace_planner(self, entry: Entry) -> None:
        """Let the next referrer, if any, encode an entry that its planner released before it was encoded (B7)."""
        entry.planner = next(iter(entry.referrers), None)
        if entry.planner is None:
            del self._planned[entry.key]
            self._forget(entry)
            self.adopted -= entry.size if entry.is_adopted else 0
        elif not entry.is_adopted:
            entry.is_adopted = True
            self.adopted += entry.size

    def _forget(self, entry: Entry) -> None:
        del self._entries[entry.key]
        self.free += entry.size


_NOTHING: dict[int, Entry] = {}
