"""Copies of each step between devices and a host cache, and the state of those that are under way.

A scheduler allocates space for one output after the other, then says what the step encodes and who was scheduled
(`plan`). An allocation of a scheduled request that the step does not encode is a load. One whose request was preempted
in the same step is neither: nobody encodes or needs it. What a step loads is pinned before anything makes room.

The processes with the tensors (ranks) run steps in order. One of them, the first, saves; every one loads. Their reports
may come late, twice or never, so a report counts only for the copy that it names, and each copy has a number of its
own. A slot is filled when the first rank says so, and is not read before. It is let go when that rank has closed the
step without it; what was loaded, when every rank has loaded it or closed the step. A rank whose copies go on during
later steps closes a step when all copies of it and of those before have ended: till then nobody gets their blocks.

What came for a request from elsewhere (`prefetched`) is loaded if the host cache does not have it, and saved in the
same step, as if it had been encoded: who asks next finds it in the host cache.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Hashable, Mapping
from dataclasses import dataclass, field

from semel.encoder.eviction import Key, Reference
from semel.encoder.extents import Extent
from semel.encoder.host_cache import HostCache, Slot
from semel.encoder.prefetched import PrefetchedOutputs

__all__ = ["Load", "Report", "Save", "Saved", "Step", "TransferCounts", "Transfers"]

FIRST = 0
"""The rank that saves."""


@dataclass(frozen=True, slots=True)
class Save:
    """Copy an output of `rows` embeddings to these blocks, as soon as it is encoded, or loaded in the same step."""

    transfer: int
    rows: int
    extents: tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Make an output of these blocks."""

    transfer: int
    extents: tuple[Extent, ...]
    form: Hashable
    is_prefetched: bool = False
    """True if the blocks are not of the host cache: it was prefetched for a request."""


@dataclass(frozen=True, slots=True)
class Step:
    """The copies of all ranks in one step."""

    number: int = 0
    """0 for a step without copies."""
    saves: Mapping[Key, Save] = field(default_factory=dict)
    loads: Mapping[Key, Load] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Saved:
    """An output is in its slot, whole."""

    transfer: int
    form: Hashable = None


@dataclass(frozen=True, slots=True)
class Report:
    """The copies that one rank has made."""

    rank: int
    closed: int = 0
    """The last step of which every copy has ended, as have those of all steps before."""
    saved: tuple[Saved, ...] = ()
    loaded: tuple[int, ...] = ()


@dataclass(slots=True)
class TransferCounts:
    """Running totals."""

    loads: int = 0
    """Outputs that a step loaded from the host cache instead of encoding them."""
    prefetched_outputs: int = 0
    """Those that it loaded because they had come for a request."""
    saves: int = 0
    """Outputs that were copied to the host cache."""
    lost: int = 0
    """Outputs that were to be copied, and were not."""


@dataclass(slots=True)
class _Loading:
    source: Slot | int
    """A slot of the host cache, or the lease of a prefetched output."""
    step: int
    ranks: set[int] = field(default_factory=set)
    """Those that have not loaded it yet."""


class Transfers:
    """The copies of one engine, of so many ranks."""

    def __init__(self, host_cache: HostCache, *, ranks: int = 1) -> None:
        self.host_cache = host_cache
        self.prefetched_outputs = PrefetchedOutputs()
        self.on_saved: Callable[[Slot], None] = lambda _: None
        """Called with a slot that was filled, and can be found."""
        self.counts = TransferCounts()
        self._ranks = ranks
        self._allocated: dict[Reference, tuple[Key, int, int]] = {}
        self._step = 0
        self._transfer = 0
        self._closed = dict.fromkeys(range(ranks), 0)
        self._saving: dict[int, tuple[int, Slot]] = {}  # transfer → step and slot, in order
        self._loading: dict[int, _Loading] = {}

    @property
    def is_busy(self) -> bool:
        """True while a copy has not been reported."""
        return bool(self._saving or self._loading)

    def allocate(self, request: str, index: int, key: Key, rows: int, blocks: int) -> None:
        """Take note that a request has space on the device for an output, to encode or to load it in this step."""
        self._allocated[request, index] = (key, rows, blocks)

    def plan(self, encodes: Mapping[str, Collection[int]], scheduled: Container[str]) -> Step:
        """Return what this step copies, now that it is known what it encodes and for whom it runs."""
        allocated, self._allocated = self._allocated, {}
        if not allocated:
            return _NOTHING
        self._step += 1
        loads: dict[Key, Load] = {}
        to_save = []
        for (request, index), (key, rows, blocks) in allocated.items():
            if request not in scheduled:
                continue
            if index in encodes.get(request, ()):
                to_save.append((key, rows, blocks))
            elif key not in loads:
                loads[key] = load = self._load(request, key, rows)
                if load.is_prefetched:
                    to_save.append((key, rows, blocks))
        saves = {key: save for key, rows, blocks in to_save if (save := self._save(key, rows, blocks)) is not None}
        return Step(self._step, saves, loads) if saves or loads else _NOTHING

    def take(self, report: Report) -> None:
        """Take the report of a rank."""
        for saved in report.saved:
            if (found := self._saving.pop(saved.transfer, None)) is not None:  # else it was reported, or given up
                self.counts.saves += 1
                self.host_cache.fill(found[1], saved.form)
                if not found[1].is_forgotten:
                    self.on_saved(found[1])
        for transfer in report.loaded:
            self._end_load(transfer, report.rank)
        if report.closed > self._closed.get(report.rank, report.closed):
            self._closed[report.rank] = report.closed
            self._close(report.rank, report.closed)

    def _save(self, key: Key, rows: int, blocks: int) -> Save | None:
        slot = self.host_cache.reserve(key, rows, blocks)
        if slot is None:
            return None
        self._transfer += 1
        slot.transfer = self._transfer
        self._saving[self._transfer] = (self._step, slot)
        return Save(self._transfer, rows, slot.extents)

    def _load(self, request: str, key: Key, rows: int) -> Load:
        self._transfer += 1
        slot = self.host_cache.filled(key)
        if slot is not None and slot.rows == rows:
            self.prefetched_outputs.drop(request, key)
            self.host_cache.pin(slot)
            self.counts.loads += 1
            self._loading[self._transfer] = _Loading(slot, self._step, set(range(self._ranks)))
            return Load(self._transfer, slot.extents, slot.form)
        prefetched = self.prefetched_outputs.get(request, key)
        assert prefetched is not None, f"{key!r} was promised, and neither is it in the host cache, nor has it come"
        self.prefetched_outputs.use(request, key)
        self.counts.prefetched_outputs += 1
        self._loading[self._transfer] = _Loading(prefetched.lease, self._step, set(range(self._ranks)))
        return Load(self._transfer, prefetched.extents, prefetched.form, is_prefetched=True)

    def _end_load(self, transfer: int, rank: int) -> None:
        loading = self._loading.get(transfer)
        if loading is None:
            return
        loading.ranks.discard(rank)
        if not loading.ranks:
            del self._loading[transfer]
            if isinstance(loading.source, Slot):
                self.host_cache.unpin(loading.source)
            else:
                self.prefetched_outputs.end(loading.source)

    def _close(self, rank: int, step: int) -> None:
        """End the copies of a rank up to a step: it has closed that step."""
        if rank == FIRST:
            self._cancel_until(step)
        for transfer in [transfer for transfer, loading in self._loading.items() if loading.step <= step]:
            self._end_load(transfer, rank)

    def _cancel_until(self, step: int) -> None:
        """Let go of slots that these steps should have filled."""
        while self._saving:
            transfer, (begun, slot) = next(iter(self._saving.items()))
            if begun > step:
                return
            del self._saving[transfer]
            self.counts.lost += 1
            self.host_cache.cancel(slot)


_NOTHING = Step()
