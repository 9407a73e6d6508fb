"""Steps that save and load, and ranks whose reports come late, twice or never.

`World` plays up to four ranks around `Transfers` and `HostCache`. Its memory is a list of what was written into each
block. Whatever a rank loads must be the whole output of that key, encoded since the last reset; and nobody writes a
block that someone has yet to read. `test_prefetched` drives it, also with the broken host caches and transfers that are
here.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from semel.encoder.eviction import Key
from semel.encoder.extents import Extent
from semel.encoder.host_cache import HostCache, Slot
from semel.encoder.transfers import Load, Report, Save, Saved, Step, Transfers

KEYS = range(5)
BESIDE = 4
"""Steps during which a copy goes on at most."""
FATES = ["arrives"] * 6 + ["doubled", "lost"]


def size_of(key: int) -> int:
    return 1 + key % 4


def blocks_of(extents: tuple[Extent, ...]) -> list[int]:
    return [block for first, count in extents for block in range(first, first + count)]


Content = tuple[int, int]
"""The key of an output and the reset before it."""


@dataclass
class Copy:
    """One save or load of one rank that has not ended."""

    step: int
    key: Any
    plan: Save | Load
    era: int


@dataclass
class Rank:
    """Runs steps in order."""

    number: int
    queue: list[tuple[Step, int, bool]] = field(default_factory=list)
    """With the era of each, and whether its saves are left out: the encoder failed on the item."""
    copies: list[Copy] = field(default_factory=list)
    """Those that go on beside the steps."""
    ran: int = 0
    begun: int = 0
    """The number of its last step with copies."""


class World:
    """A scheduler, its ranks, the memory that they share, and the mail between them."""

    def __init__(
        self,
        blocks: int,
        ranks: int,
        *,
        is_async: bool,
        host_cache_class: type[HostCache] = HostCache,
        transfers_class: type[Transfers] = Transfers,
    ) -> None:
        self.is_async = is_async
        self.host_cache = host_cache_class(blocks)
        self.transfers = transfers_class(self.host_cache, ranks=ranks)
        self.memory: list[Content | None] = [None] * blocks
        self.ranks = [Rank(number) for number in range(ranks)]
        self.mail: list[Report] = []
        self.era = 0
        self.planned = 0

    def is_late(self, rank: Rank) -> bool:
        return rank.ran < self.planned - BESIDE

    def catch_up(self) -> None:
        for rank in self.ranks:
            if rank.queue:
                self.run(rank)
            while rank.copies:
                self.end(rank, 0)

    def run(self, rank: Rank) -> None:
        step, era, fails = rank.queue.pop(0)
        rank.ran += 1
        rank.begun = step.number or rank.begun
        copies = [Copy(step.number, key, load, era) for key, load in step.loads.items()]
        if rank.number == 0 and not fails:
            copies += [Copy(step.number, key, save, era) for key, save in step.saves.items()]
        if self.is_async:
            rank.copies += copies
            return
        for copy in copies:
            self.copy(rank, copy)
        saved = tuple(Saved(copy.plan.transfer, copy.key) for copy in copies if isinstance(copy.plan, Save))
        loaded = tuple(copy.plan.transfer for copy in copies if isinstance(copy.plan, Load))
        if step.number:
            self.mail.append(Report(rank.number, step.number, saved, loaded))

    def end(self, rank: Rank, place: int) -> None:
        """A copy that went on beside the steps has ended."""
        copy = rank.copies.pop(place)
        self.copy(rank, copy)
        closed = min((one.step for one in rank.copies), default=rank.begun + 1) - 1
        if isinstance(copy.plan, Save):
            self.mail.append(Report(rank.number, closed, saved=(Saved(copy.plan.transfer, copy.key),)))
        else:
            self.mail.append(Report(rank.number, closed, loaded=(copy.plan.transfer,)))

    def copy(self, rank: Rank, copy: Copy) -> None:
        blocks = blocks_of(copy.plan.extents)
        if isinstance(copy.plan, Save):
            assert self.awaited().isdisjoint(blocks), "somebody has yet to read it"
            for block in blocks:
                self.memory[block] = (copy.key, copy.era)
        else:
            assert [self.memory[block] for block in blocks] == [(copy.key, copy.era)] * size_of(copy.key), rank
            assert copy.plan.form == copy.key

    def awaited(self) -> set[int]:
        """The blocks that some rank has to read."""
        plans = [load for rank in self.ranks for step, _, _ in rank.queue for load in step.loads.values()]
        plans += [copy.plan for rank in self.ranks for copy in rank.copies if isinstance(copy.plan, Load)]
        return {block for plan in plans for block in blocks_of(plan.extents)}

    def post(self, place: int, fate: str) -> None:
        report = self.mail[place] if fate == "doubled" else self.mail.pop(place)
        if fate != "lost":
            self.transfers.take(report)

    def change_weights(self) -> None:
        self.era += 1
        self.host_cache.forget_all()

    def reject(self, key: int) -> None:
        self.host_cache.forget(key)
        assert self.host_cache.filled(key) is None

    def check(self) -> None:
        host_cache = self.host_cache
        assert 0 <= host_cache.reserved <= host_cache.blocks - host_cache.free
        assert 0 <= host_cache.pinned <= host_cache.blocks - host_cache.free - host_cache.reserved

    def finish(self) -> None:
        """When every report of a last step has come, nothing is in anybody's hands."""
        for rank in self.ranks:
            while rank.queue:
                self.run(rank)
            while rank.copies:
                self.end(rank, 0)
        for report in self.mail:
            self.transfers.take(report)
        for rank in self.ranks:
            self.transfers.take(Report(rank.number, closed=1_000_000))
        assert (self.host_cache.reserved, self.host_cache.pinned) == (0, 0)


class FoundTooEarly(HostCache):
    def filled(self, key: Key) -> Slot | None:
        return self._slots.get(key)


class NeverPinned(HostCache):
    def pin(self, slot: Slot) -> None: ...

    def unpin(self, slot: Slot) -> None: ...


class FreeAtOnce(HostCache):
    """What is forgotten is free, even if copies use it."""

    def forget(self, key: Key) -> None:
        slot = self._slots.get(key)
        if slot is not None and slot.pins:
            self._slots.pop(key)
            self._extents.give_back(slot.extents)
            slot.extents = ()
        else:
            super().forget(key)


class Remembering(HostCache):
    """What was on its way at a reset is found afterwards."""

    def fill(self, slot: Slot, form: Hashable = None) -> None:
        if slot.is_forgotten and slot.key not in self._slots:
            slot.is_forgotten = False
            self._slots[slot.key] = slot
        super().fill(slot, form)


class AnyRank(Transfers):
    """One rank's report is enough."""

    def _end_load(self, transfer: int, rank: int) -> None:  # noqa: ARG002
        for number in range(self._ranks):
            super()._end_load(transfer, number)


class ByKey(Transfers):
    """A report counts for whatever is being saved under the same key, as in vLLM's own connector."""

    def take(self, report: Report) -> None:
        saved = [
            Saved(transfer, one.form)
            for one in report.saved
            for transfer, (_, slot) in list(self._saving.items())
            if slot.key == one.form
        ]
        super().take(Report(report.rank, report.closed, tuple(saved), report.loaded))


class Impatient(Transfers):
    """A save is given up after one step."""

    def plan(self, encodes: object, scheduled: object) -> Step:
        self._cancel_until(self._step - 2)
        return super().plan(encodes, scheduled)  # type: ignore[arg-type]


class RoomFirst(Transfers):
    """Makes room for what is saved before it pins what is loaded."""

    def plan(self, encodes: object, scheduled: object) -> Step:
        order = sorted(self._allocated.items(), key=lambda one: one[0][0] not in encodes)  # type: ignore[operator]
        for (request, index), (key, rows, blocks) in order:
            if index in encodes.get(request, ()):  # type: ignore[attr-defined]
                slot = self.host_cache.reserve(key, rows, blocks)
                if slot is not None:
                    self.host_cache.cancel(slot)
        return super().plan(encodes, scheduled)  # type: ignore[arg-type]


MUTANTS = (FoundTooEarly, NeverPinned, FreeAtOnce, Remembering, AnyRank, ByKey, Impatient, RoomFirst)
