"""Steps that save and load, and ranks whose reports come late, twice or never.

`World` plays a scheduler and up to four ranks around `Transfers` and `HostCache`. Its memory is a list of what was
written into each block. Whatever a rank loads must be the whole output of that key, encoded since the last reset; and
nobody writes a block that someone has yet to read. hypothesis drives it, and so does chance, which is faster. Broken
host caches and transfers are driven in the same way, and found.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from semel.encoder import HostCache, Key, Load, Report, Save, Saved, Slot, Step, Transfers
from semel.encoder.extents import Extent
from tests.effort import examples

KEYS = range(5)
PATIENCE = 4
FATES = ["arrives"] * 6 + ["doubled", "lost"]
steps = {"transfers": 0}


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
        self.transfers = transfers_class(self.host_cache, ranks=ranks, patience=PATIENCE if is_async else None)
        self.memory: list[Content | None] = [None] * blocks
        self.ranks = [Rank(number) for number in range(ranks)]
        self.mail: list[Report] = []
        self.era = 0
        self.planned = 0

    def schedule(self, wanted: dict[int, bool], *, fails: bool) -> None:
        """Plan a step for some items; the requests of some are preempted after they were allocated."""
        encodes: dict[str, list[int]] = {}
        scheduled = set()
        for index, (key, is_preempted) in enumerate(wanted.items()):
            request = f"r{index}"
            is_load = self.host_cache.filled(key) is not None
            self.transfers.allocate(request, index, key, size_of(key), size_of(key))
            if is_preempted:
                continue
            scheduled.add(request)
            if not is_load:
                encodes[request] = [index]
        step = self.transfers.plan(encodes, scheduled)
        assert {*step.loads, *step.saves} <= {key for key, is_preempted in wanted.items() if not is_preempted}
        self.planned += 1
        for rank in self.ranks:
            rank.queue.append((step, self.era, fails))
        while self.is_async and any(self.is_late(rank) for rank in self.ranks):
            self.catch_up()

    def is_late(self, rank: Rank) -> bool:
        """Copies beside the steps are over before anyone loses patience."""
        late = self.planned - PATIENCE
        return rank.ran < late or any(copy.step <= late for copy in rank.copies)

    def catch_up(self) -> None:
        for rank in self.ranks:
            if rank.queue:
                self.run(rank)
            while rank.copies:
                self.end(rank, 0)

    def run(self, rank: Rank) -> None:
        step, era, fails = rank.queue.pop(0)
        rank.ran += 1
        copies = [Copy(rank.ran, key, load, era) for key, load in step.loads.items()]
        if rank.number == 0 and not fails:
            copies += [Copy(rank.ran, key, save, era) for key, save in step.saves.items()]
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
        if isinstance(copy.plan, Save):
            self.mail.append(Report(rank.number, saved=(Saved(copy.plan.transfer, copy.key),)))
        else:
            self.mail.append(Report(rank.number, loaded=(copy.plan.transfer,)))

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
        steps["transfers"] += 1
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


class CopyMachine(RuleBasedStateMachine):
    """What becomes of copies and reports, whatever was planned. Who plans makes the `world`."""

    world: World

    @precondition(lambda self: any(rank.queue for rank in self.world.ranks))
    @rule(data=st.data())
    def run(self, data: st.DataObject) -> None:
        self.world.run(data.draw(st.sampled_from([rank for rank in self.world.ranks if rank.queue])))

    @precondition(lambda self: any(rank.copies for rank in self.world.ranks))
    @rule(data=st.data())
    def end_copy(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from([rank for rank in self.world.ranks if rank.copies]))
        self.world.end(rank, data.draw(st.integers(0, len(rank.copies) - 1)))

    @precondition(lambda self: self.world.mail)
    @rule(data=st.data(), fate=st.sampled_from(FATES))
    def post(self, data: st.DataObject, fate: str) -> None:
        self.world.post(data.draw(st.integers(0, len(self.world.mail) - 1)), fate)

    @rule()
    def change_weights(self) -> None:
        self.world.change_weights()

    @rule(key=st.sampled_from(KEYS))
    def reject(self, key: int) -> None:
        self.world.reject(key)

    @invariant()
    def blocks_are_free_reserved_or_filled(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()

    @classmethod
    def drive(cls, runs: int) -> None:
        """Run it so often, by hypothesis."""
        slow_is_fine = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
        effort = settings(
            max_examples=runs, stateful_step_count=50, deadline=None, suppress_health_check=slow_is_fine, database=None
        )
        run_state_machine_as_test(cls, settings=effort)


class TransferMachine(CopyMachine):
    @initialize(blocks=st.integers(3, 12), ranks=st.integers(1, 4), is_async=st.booleans())
    def start(self, blocks: int, ranks: int, is_async: bool) -> None:
        self.world = World(blocks, ranks, is_async=is_async)

    @rule(wanted=st.dictionaries(st.sampled_from(KEYS), st.booleans(), min_size=1, max_size=4), fails=st.booleans())
    def schedule(self, wanted: dict[int, bool], fails: bool) -> None:
        self.world.schedule(wanted, fails=fails)


def storm(world: World, rng: random.Random, rounds: int) -> None:
    """Drive a world by chance: mostly work and mail, seldom a reset."""
    for _ in range(rounds):
        runnable = [rank for rank in world.ranks if rank.queue]
        ending = [rank for rank in world.ranks if rank.copies]
        choice = rng.random()
        if choice < 0.3 or not (runnable or ending or world.mail):
            wanted = {key: rng.random() < 0.2 for key in rng.sample(KEYS, rng.randint(1, 3))}
            world.schedule(wanted, fails=rng.random() < 0.1)
        elif choice < 0.55 and runnable:
            world.run(rng.choice(runnable))
        elif choice < 0.7 and ending:
            rank = rng.choice(ending)
            world.end(rank, rng.randrange(len(rank.copies)))
        elif choice < 0.98 and world.mail:
            world.post(rng.randrange(len(world.mail)), rng.choice(FATES))
        elif choice > 0.99:
            world.change_weights()
        elif choice > 0.98:
            world.reject(rng.choice(KEYS))
        world.check()
    world.finish()


def storms(count: int, **classes: Any) -> Iterator[World]:
    for seed in range(count):
        rng = random.Random(seed)
        world = World(rng.randint(3, 12), rng.randint(1, 4), is_async=rng.random() < 0.5, **classes)
        storm(world, rng, 200)
        yield world


@pytest.mark.timeout(300)
@pytest.mark.parametrize("runs", [examples(150), pytest.param(2_000, marks=[pytest.mark.slow, pytest.mark.nightly])])
def test_what_is_loaded_is_whole_and_of_these_weights_whatever_becomes_of_reports(runs: int) -> None:
    TransferMachine.drive(runs)


def test_in_many_steps_by_chance_nothing_wrong_is_loaded_and_much_is_loaded() -> None:
    before = steps["transfers"]
    worlds = list(storms(examples(300)))
    assert steps["transfers"] - before >= 200 * len(worlds)
    counts = [world.transfers.counts for world in worlds]
    assert sum(one.loads for one in counts) > 3 * len(worlds)
    assert sum(one.saves for one in counts) > len(worlds)
    assert sum(one.lost for one in counts) > 10
    assert sum(world.host_cache.counts.evictions for world in worlds) > 10


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

    def _give_up(self) -> None:
        self._cancel_until(self._step - 2)


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


@pytest.mark.parametrize(
    "broken", [FoundTooEarly, NeverPinned, FreeAtOnce, Remembering, AnyRank, ByKey, Impatient, RoomFirst]
)
def test_mutant_broken_host_caches_and_transfers_are_found(broken: type) -> None:
    name = "host_cache_class" if issubclass(broken, HostCache) else "transfers_class"
    with pytest.raises((AssertionError, ValueError)):
        for _ in storms(400, **{name: broken}):
            pass


def test_a_request_that_was_preempted_in_the_step_neither_loads_nor_saves() -> None:
    host_cache = HostCache(8)
    transfers = Transfers(host_cache)
    transfers.allocate("a", 0, "x", 2, 2)
    assert transfers.plan({}, {"b"}) == Step()
    assert host_cache.free == 8


def test_a_step_that_was_closed_without_an_output_lets_its_slot_go() -> None:
    """The encoder failed on it, or its output did not fit."""
    host_cache = HostCache(8)
    transfers = Transfers(host_cache)
    for index, key in enumerate("xy"):
        transfers.allocate("a", index, key, 2, 2)
    step = transfers.plan({"a": [0, 1]}, {"a"})
    transfers.take(Report(0, step.number, (Saved(step.saves["y"].transfer, (2, 8)),)))
    assert host_cache.filled("x") is None
    assert host_cache.filled("y") is not None
    assert (host_cache.free, host_cache.reserved) == (6, 0)
    assert (transfers.counts.saves, transfers.counts.lost) == (1, 1)
