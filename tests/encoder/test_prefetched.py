"""Outputs that came for one request: loaded for it alone, once, and lent until every rank has read them.

`PrefetchWorld` is the world of `transfers` with requests that live for several steps, and a lender, who fills
blocks behind the host cache's and scribbles over them as soon as a lease is done. Whatever a rank loads must still be
whole, and of these weights. Chance drives it, by a seed. Broken prefetched outputs are driven in the same way, and
found.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from semel.core import Digest, PrefetchedOutput
from semel.encoder.eviction import Key
from semel.encoder.extents import FreeExtents
from semel.encoder.host_cache import HostCache, Slot
from semel.encoder.prefetched import PrefetchedOutputs
from semel.encoder.transfers import Report, Saved, Step, Transfers
from tests.encoder.transfers import FATES, KEYS, World, blocks_of, size_of
from tests.encoder.transfers import MUTANTS as TRANSFER_MUTANTS

STAGING = 10
DIGEST = Digest(bytes(32))
LENGTH = 10
"""Tokens of an item."""


class PrefetchWorld(World):
    """A world with a lender."""

    def __init__(
        self,
        blocks: int,
        ranks: int,
        *,
        is_async: bool,
        prefetched_class: type[PrefetchedOutputs] = PrefetchedOutputs,
        **classes: Any,
    ) -> None:
        super().__init__(blocks, ranks, is_async=is_async, **classes)
        self.used: list[int] = []
        self.transfers.prefetched_outputs = self.prefetched_outputs = prefetched_class()
        self.prefetched_outputs.on_done = self.done
        self.prefetched_outputs.on_use = self.used.append
        self.memory += [None] * STAGING
        self.lender = FreeExtents(STAGING)
        self.lent: dict[int, PrefetchedOutput] = {}
        self.came: dict[str, dict[int, int]] = {}
        """The leases that a request can still use, by key: the slow model."""
        self.needs: dict[str, list[int]] = {}
        self.leases = 0

    def come(self, keys: list[int], fetched: set[int]) -> None:
        """A request comes, and with it those of its outputs that were fetched and for which there was room."""
        name = f"request {self.leases}.{len(self.needs)}"
        self.leases += 1
        self.needs[name], self.came[name] = keys, {}
        prefetched_outputs = []
        for place, key in enumerate(keys):
            if key not in fetched or self.lender.free < size_of(key):
                continue
            self.leases += 1
            extents = tuple((self.host_cache.blocks + first, count) for first, count in self.lender.take(size_of(key)))
            prefetched: Any = PrefetchedOutput(self.leases, DIGEST, extents, key)  # type: ignore[arg-type]
            for block in blocks_of(extents):
                self.memory[block] = (key, self.era)
            self.lent[self.leases] = prefetched
            self.came[name][key] = self.leases
            prefetched_outputs.append((key, prefetched, (place + 1) * LENGTH))
        self.prefetched_outputs.add(name, prefetched_outputs)

    def done(self, lease: int) -> None:
        """The lender gets its blocks back, once, and uses them for something else."""
        prefetched = self.lent.pop(lease)
        blocks = blocks_of(prefetched.extents)
        assert self.awaited().isdisjoint(blocks), "a rank has yet to read it"
        for block in blocks:
            self.memory[block] = None
        self.lender.give_back([(first - self.host_cache.blocks, count) for first, count in prefetched.extents])
        for came in self.came.values():
            for key in [key for key, one in came.items() if one == lease]:
                del came[key]

    def step(self, fates: dict[str, bool], *, fails: bool) -> None:
        """Plan a step that needs everything that some requests show; some of these are preempted in it."""
        encodes: dict[str, list[int]] = {}
        planned: dict[int, str] = {}
        for name, is_preempted in fates.items():
            for index, key in enumerate(self.needs[name]):
                lease = self.came[name].get(key)
                prefetched = self.prefetched_outputs.get(name, key)
                assert (None if prefetched is None else prefetched.lease) == lease, "what came is for its request alone"
                if key in planned:
                    continue  # the cache has it, or another request of this step brings it
                is_load = self.host_cache.filled(key) is not None or prefetched is not None
                self.transfers.allocate(name, index, key, size_of(key), size_of(key))
                planned[key] = name
                if not is_load and not is_preempted:
                    encodes.setdefault(name, []).append(index)
        in_host_cache = {key for key in planned if self.host_cache.filled(key) is not None}
        preempted = {name: dict(self.came[name]) for name, is_preempted in fates.items() if is_preempted}
        before = len(self.used)
        step = self.transfers.plan(encodes, {name for name, is_preempted in fates.items() if not is_preempted})
        self.check_step(step, planned, in_host_cache, self.used[before:])
        assert all(self.came[name] == came for name, came in preempted.items()), "what was not loaded can be"
        self.planned += 1
        for rank in self.ranks:
            rank.queue.append((step, self.era, fails))
        while self.is_async and any(self.is_late(rank) for rank in self.ranks):
            self.catch_up()

    def check_step(self, step: Step, planned: dict[int, str], in_host_cache: set[int], used: list[int]) -> None:
        """What came is loaded where the host cache lacks it, for whom it came, and said to be used."""
        assert len({*self.used}) == len(self.used), "used once"
        from_lender = {key: load for key, load in step.loads.items() if load.is_prefetched}
        assert in_host_cache.isdisjoint(from_lender)
        expected = []
        for key in from_lender:
            assert isinstance(key, int)
            expected.append(self.came[planned[key]].pop(key))
        assert sorted(used) == sorted(expected)

    def advance(self, name: str, computed: int) -> None:
        """A prefix covers the first items of a request."""
        self.prefetched_outputs.advance(name, computed)
        for place, key in enumerate(self.needs[name]):
            assert not ((place + 1) * LENGTH <= computed and key in self.came[name])

    def end_request(self, name: str) -> None:
        self.prefetched_outputs.finish(name)
        del self.needs[name]
        assert not self.came.pop(name), "what nobody will load is done"

    def change_weights(self) -> None:
        super().change_weights()
        self.prefetched_outputs.forget_all()
        assert not any(self.came.values())

    def finish(self) -> None:
        for name in list(self.needs):
            self.end_request(name)
        super().finish()
        assert (self.lent, self.lender.free) == ({}, STAGING), "every lease is done in the end"


def storm(world: PrefetchWorld, rng: random.Random, rounds: int) -> None:
    for _ in range(rounds):
        choice = rng.random()
        if choice < 0.12 or not world.needs:
            keys = rng.sample(KEYS, rng.randint(1, 3))
            world.come(keys, {key for key in keys if rng.random() < 0.6})
        elif choice < 0.88:
            work(world, rng, choice)
        else:
            interfere(world, rng, choice)
        world.check()
    world.finish()


def work(world: PrefetchWorld, rng: random.Random, choice: float) -> None:
    """Steps, copies and mail."""
    live = sorted(world.needs)
    runnable = [rank for rank in world.ranks if rank.queue]
    ending = [rank for rank in world.ranks if rank.copies]
    if choice < 0.35:
        fates = {name: rng.random() < 0.2 for name in rng.sample(live, min(len(live), rng.randint(1, 2)))}
        world.step(fates, fails=rng.random() < 0.1)
    elif choice < 0.55 and runnable:
        world.run(rng.choice(runnable))
    elif choice < 0.7 and ending:
        rank = rng.choice(ending)
        world.end(rank, rng.randrange(len(rank.copies)))
    elif world.mail:
        world.post(rng.randrange(len(world.mail)), rng.choice(FATES))


def interfere(world: PrefetchWorld, rng: random.Random, choice: float) -> None:
    """Aborts, prefixes, wrong outputs, new weights."""
    name = rng.choice(sorted(world.needs))
    if choice < 0.95:
        world.end_request(name)
    elif choice < 0.97:
        world.advance(name, rng.randint(0, 3 * LENGTH))
    elif choice < 0.98:
        world.reject(rng.choice(KEYS))
    elif choice > 0.99:
        world.change_weights()


def storms(count: int, **classes: Any) -> Iterator[PrefetchWorld]:
    for seed in range(count):
        rng = random.Random(seed)
        world = PrefetchWorld(rng.randint(3, 12), rng.randint(1, 4), is_async=rng.random() < 0.5, **classes)
        storm(world, rng, 200)
        yield world


@pytest.mark.timeout(600)
@pytest.mark.parametrize("runs", [200, pytest.param(2_000, marks=[pytest.mark.slow, pytest.mark.nightly])])
def test_what_came_is_loaded_for_its_request_once_and_lent_until_every_rank_has_it(runs: int) -> None:
    worlds = list(storms(runs))
    counts = [world.transfers.counts for world in worlds]
    assert sum(one.prefetched_outputs for one in counts) > 500
    assert sum(one.loads for one in counts) > 1_000
    assert sum(one.saves for one in counts) > 500
    assert min(sum(one.lost for one in counts), sum(world.host_cache.counts.evictions for world in worlds)) > 10


class DoneWhenUsed(PrefetchedOutputs):
    """A lease is done while ranks still load."""

    def use(self, request: str, key: Key) -> PrefetchedOutput:
        prefetched = super().use(request, key)
        self.end(prefetched.lease)
        return prefetched

    def end(self, lease: int) -> None:
        if lease in self._open:
            super().end(lease)


class DoneWithItsRequest(PrefetchedOutputs):
    """The end of a request ends its loads."""

    def use(self, request: str, key: Key) -> PrefetchedOutput:
        prefetched = self._waiting[request][key][0]
        self.on_use(prefetched.lease)
        self._waiting[request][key] = (prefetched, 0)
        self._using = {*getattr(self, "_using", ()), (request, key)}
        return prefetched

    def get(self, request: str, key: Key) -> PrefetchedOutput | None:
        return None if (request, key) in getattr(self, "_using", ()) else super().get(request, key)

    def end(self, lease: int) -> None:
        if lease in self._open:
            super().end(lease)


class ForAnyRequest(PrefetchedOutputs):
    """Whoever asks gets it."""

    def get(self, request: str, key: Key) -> PrefetchedOutput | None:
        return next((one[key][0] for one in self._waiting.values() if key in one), super().get(request, key))


class UsedTwice(PrefetchedOutputs):
    """A load does not forget it."""

    def use(self, request: str, key: Key) -> PrefetchedOutput:
        self.on_use(self._waiting[request][key][0].lease)
        return self._waiting[request][key][0]


class ForgottenWhenPreempted(Transfers):
    """What a step allocated and did not schedule is dropped."""

    def plan(self, encodes: Any, scheduled: Any) -> Step:
        for (request, _), (key, _, _) in self._allocated.items():
            if request not in scheduled:
                self.prefetched_outputs.drop(request, key)
        return super().plan(encodes, scheduled)


class Unforgetting(PrefetchedOutputs):
    """What came before new weights is used after."""

    def forget_all(self) -> None: ...


MUTANTS = (
    *TRANSFER_MUTANTS,
    *(DoneWhenUsed, DoneWithItsRequest, ForAnyRequest, UsedTwice, ForgottenWhenPreempted, Unforgetting),
)

_PARTS: dict[type, str] = {
    PrefetchedOutputs: "prefetched_class",
    HostCache: "host_cache_class",
    Transfers: "transfers_class",
}


@pytest.mark.parametrize("broken", MUTANTS)
def test_mutant_broken_host_caches_transfers_and_prefetched_outputs_are_found(broken: type) -> None:
    kind = next(kind for kind in _PARTS if issubclass(broken, kind))
    with pytest.raises((AssertionError, KeyError, ValueError)):
        for _ in storms(400, **{_PARTS[kind]: broken}):
            pass


def arrived(lease: int = 1, rows: int = 2) -> PrefetchedOutput:
    return PrefetchedOutput(lease, DIGEST, ((8, rows),), (rows, 4, "torch.float32"))


def test_a_slot_of_another_size_is_not_loaded_in_place_of_what_came() -> None:
    host_cache = HostCache(8)
    transfers = Transfers(host_cache)
    slot = host_cache.reserve("x", 3, 3)
    assert slot is not None
    host_cache.fill(slot, "form")
    transfers.prefetched_outputs.add("a", [("x", arrived(), 5)])
    transfers.allocate("a", 0, "x", 2, 2)
    step = transfers.plan({}, {"a"})
    assert step.loads["x"].extents == ((8, 2),)
    assert not step.saves, "the host cache has one for the key"


def test_what_came_is_adopted_and_the_next_request_finds_it_in_the_host_cache() -> None:
    host_cache = HostCache(8)
    saved: list[Slot] = []
    transfers = Transfers(host_cache)
    transfers.on_saved = saved.append
    transfers.prefetched_outputs.add("a", [("x", arrived(), 5)])
    transfers.allocate("a", 0, "x", 2, 2)
    step = transfers.plan({}, {"a"})
    report = Report(0, step.number, (Saved(step.saves["x"].transfer, "form"),), (step.loads["x"].transfer,))
    transfers.take(report)
    found = host_cache.filled("x")
    assert found is not None
    assert saved == [found]
    assert found.transfer == step.saves["x"].transfer


def test_a_lease_is_not_taken_twice() -> None:
    done: list[int] = []
    prefetched_outputs = PrefetchedOutputs()
    prefetched_outputs.on_done = done.append
    prefetched_outputs.add("a", [("x", arrived(7), 5)])
    prefetched_outputs.add("b", [("x", arrived(7), 5)])
    assert prefetched_outputs.get("b", "x") is None
    prefetched_outputs.finish("b")
    assert done == []
    prefetched_outputs.finish("a")
    assert done == [7]
