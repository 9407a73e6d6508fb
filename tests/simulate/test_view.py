"""What all frontends share in a simulation is what each would know by itself: held equal to shipped directories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.core import Digest
from semel.fleet.balance import Balance
from semel.fleet.ejection import EjectionLimits
from semel.fleet.ranking import numbers_in
from semel.fleet.retry_policy import FleetHealth
from semel.lab.simulate.batches import Kernel
from semel.lab.simulate.view import FleetView, FrontendView, QuickRanking, name_of, number_of
from semel.lab.simulate.workload import digest_of
from semel.ledger import Directory
from tests.effort import examples
from tests.fleet.test_ejection import scanned

ITEMS = [digest_of("", key) for key in range(6)]


class Apart:
    """Every frontend by itself, slow and obvious: what it was told of each worker, and what it has under way."""

    def __init__(self, frontends: int, workers: int) -> None:
        self.held: list[set[Digest]] = [set() for _ in range(workers)]
        self.known = [[set[Digest]() for _ in range(workers)] for _ in range(frontends)]
        self.others = [[0] * workers for _ in range(frontends)]
        self.unanswered = [[0] * workers for _ in range(frontends)]
        self.pending = [[Counter[Digest]() for _ in range(workers)] for _ in range(frontends)]
        self.preparing = [[0] * workers for _ in range(frontends)]
        self.contexts: list[AbstractContextManager[None]] = []  # which end when nobody has them

    def tell(self, frontend: int, worker: int) -> None:
        running = sum(one[worker] for one in self.unanswered)
        self.known[frontend][worker] = set(self.held[worker])
        self.others[frontend][worker] = max(0, running - self.unanswered[frontend][worker])

    def choose(self, frontend: int, digests: list[Digest]) -> tuple[list[int], int]:
        """Who has the items, and the choice, by a directory and a balance that are made anew."""
        directory, balance = Directory(), Balance()
        for worker, known in enumerate(self.known[frontend]):
            assert directory.enter() == worker
            for digest in sorted(known):
                directory.announced.add(digest, 1 << worker)
            for digest, count in self.pending[frontend][worker].items():
                if count:
                    directory.pending.add(digest, 1 << worker)
            load = self.others[frontend][worker] + self.unanswered[frontend][worker]
            balance.put(worker, name_of(worker), load + self.preparing[frontend][worker])
        holders = directory.holders(digests)
        return holders, balance.choose((1 << len(self.held)) - 1, digests, holders, digests[0] if digests else b"text")


def held_equal(seed: int, kind: type[FleetView] = FleetView) -> bool:  # noqa: C901 a list of what can happen
    """Whether a random history has the same holders and choices in both."""
    rng = Random(seed)
    frontends, workers = rng.randint(1, 4), rng.randint(2, 24)
    apart, view = Apart(frontends, workers), kind(workers)
    peers = [FrontendView(1 << 30, 1, None) for _ in range(frontends)]
    for worker in range(workers):
        view.join(worker)
    under_way: list[tuple[int, int, list[Digest]]] = []
    for _ in range(60):
        match rng.choice(("ask", "ask", "accept", "end", "evict", "tell")):
            case "ask":
                frontend, digests = rng.randrange(frontends), rng.sample(ITEMS, rng.randint(0, 4))
                expected = apart.choose(frontend, digests)
                peer, prefix = peers[frontend], digests[0] if digests else b"text"
                found = [holders for digest in digests if (holders := view.holders(peer, digest))]
                if (found, view.choose(peer, digests, prefix)) != expected:
                    return False
                _prepare(apart, view, peer, frontend, expected[1], digests, under_way, rng)
            case "accept" if under_way:
                frontend, worker, digests = rng.choice(under_way)
                for digest in digests:
                    if digest not in apart.held[worker]:
                        apart.held[worker].add(digest)
                        view.updates.hold(worker, digest)
                _tell_one(apart, view, peers[frontend], frontend, worker)
            case "end" if under_way:
                frontend, worker, _ = under_way.pop(rng.randrange(len(under_way)))
                apart.unanswered[frontend][worker] -= 1
                peers[frontend].links[worker].unanswered -= 1
                _tell_one(apart, view, peers[frontend], frontend, worker)
            case "evict":
                worker = rng.randrange(workers)
                if apart.held[worker]:
                    gone = rng.choice(sorted(apart.held[worker]))
                    apart.held[worker].remove(gone)
                    view.updates.drop(worker, gone)
            case "tell":
                worker = rng.randrange(workers)
                view.tell(worker, sum(one[worker] for one in apart.unanswered))
                for frontend in range(frontends):
                    apart.tell(frontend, worker)
    return True


def _prepare(
    apart: Apart,
    view: FleetView,
    peer: FrontendView,
    frontend: int,
    worker: int,
    digests: list[Digest],
    under_way: list[tuple[int, int, list[Digest]]],
    rng: Random,
) -> None:
    """A request is prepared, and sent at once or never."""
    link = view.link(peer, worker)
    if rng.random() < 0.2:
        apart.contexts.append(link.pending.request(tuple(digests)))
        apart.contexts[-1].__enter__()
        apart.pending[frontend][worker].update(digests)
        apart.preparing[frontend][worker] += 1
        return
    link.unanswered += 1
    apart.unanswered[frontend][worker] += 1
    under_way.append((frontend, worker, digests))


def _tell_one(apart: Apart, view: FleetView, peer: FrontendView, frontend: int, worker: int) -> None:
    view.tell_one(peer, worker, sum(one[worker] for one in apart.unanswered))
    apart.tell(frontend, worker)


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, 1 << 32))
def test_frontends_that_share_know_and_choose_as_each_by_itself(seed: int) -> None:
    assert held_equal(seed)


class _Deaf(FleetView):
    """A mutant: what comes with an answer is not noticed."""

    def tell_one(self, frontend: FrontendView, worker: int, running: int) -> None:
        frontend.links[worker].hear(running)


class _Forgetful(FleetView):
    """A mutant: loads that a frontend put in before it chose stay for the others."""

    def choose(
        self, frontend: FrontendView, digests: Sequence[Digest], prefix: bytes = b"", *, without: int = 0
    ) -> int | None:
        before = list(self.known_load)
        for worker, link in frontend.links.items():
            self.known_load[worker] = link.load
        try:
            return super().choose(frontend, digests, prefix, without=without)
        finally:
            self.known_load[:] = before


class _Unclamped(FleetView):
    """A mutant: a worker that has not got a request yet takes it off the load."""

    def tell(self, worker: int, running: int) -> tuple[int, int]:
        counts = super().tell(worker, running)
        for link in self._peers[worker].values():
            link.others = running
        return counts


@pytest.mark.parametrize("mutant", [_Deaf, _Forgetful, _Unclamped])
def test_a_wrong_view_is_found(mutant: type[FleetView]) -> None:
    assert not all(held_equal(seed, mutant) for seed in range(60))


def left_out_alike(seed: int, kind: type[FleetView] = FleetView) -> bool:
    """Whether a frontend leaves out the ejected workers that a look at every worker finds."""
    rng, now = Random(seed), 0.0
    health = FleetHealth(EjectionLimits(1), now=lambda: now)
    view, peer = kind(12), FrontendView(1 << 30, 1, health)
    for worker in range(12):
        view.join(worker)
    for _ in range(40):
        worker = rng.randrange(12)
        match rng.choice(("fail", "fail", "begin", "prepare", "prepare", "wait", "leave", "join")):
            case "fail":
                health.fail(health.begin(name_of(worker)))
            case "begin":
                health.begin(name_of(worker))
            case "prepare" if view.serving >> worker & 1:
                view.link(peer, worker).pending.begin(())
            case "wait":
                now += 5.0
            case "leave" if view.serving >> worker & 1:
                view.leave(worker, ())
            case "join" if not view.serving >> worker & 1:
                view.join(worker)
        preparing = {name_of(number) for number, link in peer.links.items() if link.pending.requests}
        names = [name_of(number) for number in numbers_in(view.serving)]
        expected = set(names) - set(scanned(health, names, now, preparing))
        if view._left_out(peer, health) != sum(1 << number_of(name) for name in expected):
            return False
    return True


class _Counting(FleetView):
    """A mutant: workers that are gone are counted."""

    def leave(self, worker: int, items: Sequence[Digest]) -> None:
        super().leave(worker, items)
        self._names.add(name_of(worker))


def test_ejected_workers_are_left_out_as_by_a_look_at_every_worker() -> None:
    assert all(left_out_alike(seed) for seed in range(100))
    assert not all(left_out_alike(seed, _Counting) for seed in range(100)), "control"


def test_the_quick_hash_ranks_everybody_alike_often_and_moves_only_what_a_newcomer_wins() -> None:
    ranking, everybody = QuickRanking(), (1 << 50) - 1
    for number in range(50):
        ranking.put(number, name_of(number))
    keys = [digest_of("", key) for key in range(2_000)]
    before = [ranking.top(key, everybody, 2) for key in keys]
    wins = Counter(first for first, _ in before)
    assert min(wins.values()) > 15
    assert max(wins.values()) < 80
    ranking.put(50, name_of(50))
    after = [ranking.top(key, everybody | 1 << 50, 2) for key in keys]
    assert all(one == other or 50 in other for one, other in zip(before, after, strict=True))
    assert before == [ranking.top(key, everybody, 2) for key in keys]
    assert all(ranking.top(key, 0b11, 2) == ranking._top(key, np.array([0, 1]), 2) for key in keys[:50])


def test_events_of_one_time_come_in_the_order_in_which_they_were_set() -> None:
    kernel, seen = Kernel(), list[tuple[float, str]]()

    def note(what: str) -> None:
        seen.append((kernel.now, what))
        if what == "a":
            kernel.after(1.0, note, "d")
            kernel.at(0.5, note, "late")

    for when, what in ((2.0, "b"), (1.0, "a"), (2.0, "c"), (9.0, "e")):
        kernel.at(when, note, what)
    kernel.run(until=5.0)
    assert seen == [(1.0, "a"), (1.0, "late"), (2.0, "b"), (2.0, "c"), (2.0, "d")]
    kernel.run()
    assert seen[-1] == (9.0, "e")
