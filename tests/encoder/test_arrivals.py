"""Outputs that came for one request: loaded for it alone, once, and lent until every rank has read them.

`ArrivalWorld` is the world of `test_transfers` with requests that live for several steps, and a lender, who fills
blocks behind the shelf's and scribbles over them as soon as a ticket is done. Whatever a rank loads must still be whole
and of these weights. Chance drives it, by a seed. Broken arrivals are driven in the same way, and found.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from semel.core import Arrival, Digest
from semel.encoder import Arrivals, Key, Report, Saved, Shelf, Slot, Step, Transfers
from semel.encoder.extents import FreeExtents
from tests.encoder.test_transfers import FATES, KEYS, PATIENCE, World, blocks_of, size_of
from tests.encoder.test_transfers import MUTANTS as TRANSFER_MUTANTS

STAGING = 10
DIGEST = Digest(bytes(32))
LENGTH = 10
"""Tokens of an item."""


class ArrivalWorld(World):
    """A world with a lender."""

    def __init__(
        self,
        blocks: int,
        ranks: int,
        *,
        is_async: bool,
        arrivals_class: type[Arrivals] = Arrivals,
        shelf_class: type[Shelf] = Shelf,
        transfers_class: type[Transfers] = Transfers,
    ) -> None:
        super().__init__(blocks, ranks, is_async=is_async, shelf_class=shelf_class)
        self.used: list[int] = []
        patience = PATIENCE if is_async else None
        self.transfers = transfers_class(self.shelf, ranks=ranks, patience=patience, adopts=not is_async)
        self.transfers.arrivals = self.arrivals = arrivals_class()
        self.arrivals.on_done = self.done
        self.arrivals.on_use = self.used.append
        self.memory += [None] * STAGING
        self.lender = FreeExtents(STAGING)
        self.lent: dict[int, Arrival] = {}
        self.came: dict[str, dict[int, int]] = {}
        """The tickets that a request can still use, by key: the slow model."""
        self.needs: dict[str, list[int]] = {}
        self.tickets = 0

    def come(self, keys: list[int], fetched: set[int]) -> None:
        """A request comes, and with it those of its outputs that were fetched and for which there was room."""
        name = f"request {self.tickets}.{len(self.needs)}"
        self.tickets += 1
        self.needs[name], self.came[name] = keys, {}
        arrivals = []
        for place, key in enumerate(keys):
            if key not in fetched or self.lender.free < size_of(key):
                continue
            self.tickets += 1
            extents = tuple((self.shelf.blocks + first, count) for first, count in self.lender.take(size_of(key)))
            arrival: Any = Arrival(self.tickets, DIGEST, extents, key)  # type: ignore[arg-type]
            for block in blocks_of(extents):
                self.memory[block] = (key, self.era)
            self.lent[self.tickets] = arrival
            self.came[name][key] = self.tickets
            arrivals.append((key, arrival, (place + 1) * LENGTH))
        self.arrivals.add(name, arrivals)

    def done(self, ticket: int) -> None:
        """The lender gets its blocks back, once, and uses them for something else."""
        arrival = self.lent.pop(ticket)
        blocks = blocks_of(arrival.extents)
        assert self.awaited().isdisjoint(blocks), "a rank has yet to read it"
        for block in blocks:
            self.memory[block] = None
        self.lender.give_back([(first - self.shelf.blocks, count) for first, count in arrival.extents])
        for came in self.came.values():
            for key in [key for key, one in came.items() if one == ticket]:
                del came[key]

    def step(self, fates: dict[str, bool], *, fails: bool) -> None:
        """Plan a step that needs everything that some requests show; some of these are preempted in it."""
        encodes: dict[str, list[int]] = {}
        planned: dict[int, str] = {}
        for name, is_preempted in fates.items():
            for index, key in enumerate(self.needs[name]):
                ticket = self.came[name].get(key)
                arrival = self.arrivals.get(name, key)
                assert (None if arrival is None else arrival.ticket) == ticket, "what came is for its request alone"
                if key in planned:
                    continue  # the cache has it, or another request of this step brings it
                is_load = self.shelf.filled(key) is not None or arrival is not None
                self.transfers.allocate(name, index, key, size_of(key), size_of(key))
                planned[key] = name
                if not is_load and not is_preempted:
                    encodes.setdefault(name, []).append(index)
        on_shelf = {key for key in planned if self.shelf.filled(key) is not None}
        preempted = {name: dict(self.came[name]) for name, is_preempted in fates.items() if is_preempted}
        before = len(self.used)
        step = self.transfers.plan(encodes, {name for name, is_preempted in fates.items() if not is_preempted})
        self.check_step(step, planned, on_shelf, self.used[before:])
        assert all(self.came[name] == came for name, came in preempted.items()), "what was not loaded can be"
        self.planned += 1
        for rank in self.ranks:
            rank.queue.append((step, self.era, fails))
        while self.is_async and any(self.is_late(rank) for rank in self.ranks):
            self.catch_up()

    def check_step(self, step: Step, planned: dict[int, str], on_shelf: set[int], used: list[int]) -> None:
        """What came is loaded where the shelf lacks it, for whom it came, and said to be used."""
        assert len({*self.used}) == len(self.used), "used once"
        from_lender = {key: load for key, load in step.loads.items() if load.is_arrival}
        assert on_shelf.isdisjoint(from_lender)
        expected = []
        for key in from_lender:
            assert isinstance(key, int)
            expected.append(self.came[planned[key]].pop(key))
        assert sorted(used) == sorted(expected)
        if self.is_async:
            assert from_lender.keys().isdisjoint(step.saves)

    def advance(self, name: str, computed: int) -> None:
        """A prefix covers the first items of a request."""
        self.arrivals.advance(name, computed)
        for place, key in enumerate(self.needs[name]):
            assert not ((place + 1) * LENGTH <= computed and key in self.came[name])

    def end_request(self, name: str) -> None:
        self.arrivals.finish(name)
        del self.needs[name]
        assert not self.came.pop(name), "what nobody will load is done"

    def change_weights(self) -> None:
        super().change_weights()
        self.arrivals.forget_all()
        assert not any(self.came.values())

    def finish(self) -> None:
        for name in list(self.needs):
            self.end_request(name)
        super().finish()
        assert (self.lent, self.lender.free) == ({}, STAGING), "every ticket is done in the end"


def storm(world: ArrivalWorld, rng: random.Random, rounds: int) -> None:
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


def work(world: ArrivalWorld, rng: random.Random, choice: float) -> None:
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


def interfere(world: ArrivalWorld, rng: random.Random, choice: float) -> None:
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


def storms(count: int, **classes: Any) -> Iterator[ArrivalWorld]:
    for seed in range(count):
        rng = random.Random(seed)
        world = ArrivalWorld(rng.randint(3, 12), rng.randint(1, 4), is_async=rng.random() < 0.5, **classes)
        storm(world, rng, 200)
        yield world


@pytest.mark.timeout(600)
@pytest.mark.parametrize("runs", [200, pytest.param(2_000, marks=[pytest.mark.slow, pytest.mark.nightly])])
def test_what_came_is_loaded_for_its_request_once_and_lent_until_every_rank_has_it(runs: int) -> None:
    worlds = list(storms(runs))
    counts = [world.transfers.counts for world in worlds]
    assert sum(one.arrivals for one in counts) > 500
    assert sum(one.loads for one in counts) > 1_000
    assert sum(one.saves for one in counts) > 500
    assert min(sum(one.lost for one in counts), sum(world.shelf.counts.evictions for world in worlds)) > 10


class DoneWhenUsed(Arrivals):
    """A ticket is done while ranks still load."""

    def use(self, request: str, key: Key) -> Arrival:
        arrival = super().use(request, key)
        self.end(arrival.ticket)
        return arrival

    def end(self, ticket: int) -> None:
        if ticket in self._open:
            super().end(ticket)


class DoneWithItsRequest(Arrivals):
    """The end of a request ends its loads."""

    def use(self, request: str, key: Key) -> Arrival:
        arrival = self._waiting[request][key][0]
        self.on_use(arrival.ticket)
        self._waiting[request][key] = (arrival, 0)
        self._using = {*getattr(self, "_using", ()), (request, key)}
        return arrival

    def get(self, request: str, key: Key) -> Arrival | None:
        return None if (request, key) in getattr(self, "_using", ()) else super().get(request, key)

    def end(self, ticket: int) -> None:
        if ticket in self._open:
            super().end(ticket)


class ForAnyRequest(Arrivals):
    """Whoever asks gets it."""

    def get(self, request: str, key: Key) -> Arrival | None:
        return next((one[key][0] for one in self._waiting.values() if key in one), super().get(request, key))


class UsedTwice(Arrivals):
    """A load does not forget it."""

    def use(self, request: str, key: Key) -> Arrival:
        self.on_use(self._waiting[request][key][0].ticket)
        return self._waiting[request][key][0]


class ForgottenWhenPreempted(Transfers):
    """What a step allocated and did not schedule is dropped."""

    def plan(self, encodes: Any, scheduled: Any) -> Step:
        for (request, _), (key, _, _) in self._allocated.items():
            if request not in scheduled:
                self.arrivals.drop(request, key)
        return super().plan(encodes, scheduled)


class Unforgetting(Arrivals):
    """What came before new weights is used after."""

    def forget_all(self) -> None: ...


MUTANTS = (
    *TRANSFER_MUTANTS,
    *(DoneWhenUsed, DoneWithItsRequest, ForAnyRequest, UsedTwice, ForgottenWhenPreempted, Unforgetting),
)


@pytest.mark.parametrize("broken", MUTANTS)
def test_mutant_broken_shelves_transfers_and_arrivals_are_found(broken: type) -> None:
    kind = next(kind for kind in (Arrivals, Shelf, Transfers) if issubclass(broken, kind))
    with pytest.raises((AssertionError, KeyError, ValueError)):
        for _ in storms(400, **{f"{kind.__name__.lower()}_class": broken}):
            pass


def arrived(ticket: int = 1, rows: int = 2) -> Arrival:
    return Arrival(ticket, DIGEST, ((8, rows),), (rows, 4, "torch.float32"))


def test_what_is_on_the_shelf_is_loaded_from_there_and_the_ticket_is_done() -> None:
    shelf = Shelf(8)
    done: list[int] = []
    transfers = Transfers(shelf, adopts=True)
    transfers.arrivals.on_done = done.append
    slot = shelf.reserve("x", 2, 2)
    assert slot is not None
    shelf.fill(slot, "form")
    transfers.arrivals.add("a", [("x", arrived(), 5)])
    transfers.allocate("a", 0, "x", 2, 2)
    step = transfers.plan({}, {"a"})
    assert not step.loads["x"].is_arrival
    assert (step.saves, done) == ({}, [1])
    assert (transfers.counts.loads, transfers.counts.arrivals) == (1, 0)


def test_a_slot_of_another_size_is_not_loaded_in_place_of_what_came() -> None:
    shelf = Shelf(8)
    transfers = Transfers(shelf, adopts=True)
    slot = shelf.reserve("x", 3, 3)
    assert slot is not None
    shelf.fill(slot, "form")
    transfers.arrivals.add("a", [("x", arrived(), 5)])
    transfers.allocate("a", 0, "x", 2, 2)
    step = transfers.plan({}, {"a"})
    assert step.loads["x"].extents == ((8, 2),)
    assert not step.saves, "the shelf has one for the key"


def test_what_came_is_adopted_and_the_next_request_finds_it_on_the_shelf() -> None:
    shelf = Shelf(8)
    saved: list[Slot] = []
    transfers = Transfers(shelf, adopts=True)
    transfers.on_saved = saved.append
    transfers.arrivals.add("a", [("x", arrived(), 5)])
    transfers.allocate("a", 0, "x", 2, 2)
    step = transfers.plan({}, {"a"})
    report = Report(0, step.number, (Saved(step.saves["x"].transfer, "form"),), (step.loads["x"].transfer,))
    transfers.take(report)
    found = shelf.filled("x")
    assert found is not None
    assert saved == [found]
    assert found.transfer == step.saves["x"].transfer


def test_a_ticket_is_not_taken_twice() -> None:
    done: list[int] = []
    arrivals = Arrivals()
    arrivals.on_done = done.append
    arrivals.add("a", [("x", arrived(7), 5)])
    arrivals.add("b", [("x", arrived(7), 5)])
    assert arrivals.get("b", "x") is None
    arrivals.finish("b")
    assert done == []
    arrivals.finish("a")
    assert done == [7]
