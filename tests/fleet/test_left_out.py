"""Ejected workers are left out of a choice as by a look at every worker, and a choice costs no more for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from random import Random
from time import thread_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.core import Digest
from semel.fleet.ejection import Attempt, EjectionLimits
from semel.fleet.failover import FleetHealth
from semel.fleet.fleet import Fleet
from semel.fleet.worker import RemoteWorker
from tests.effort import examples
from tests.fleet.test_ejection import scanned
from tests.fleet.unlinked import UnlinkedWorker
from tests.wire.examples import digest_of

ITEMS = [digest_of(number) for number in range(6)]
STEPS = 40


class FailingFleet:
    """A fleet of a seed: its workers fail, are tried again, come and go."""

    def __init__(self, seed: int, kind: type[Fleet] = Fleet) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.health = FleetHealth(EjectionLimits(1), now=lambda: self.now)
        self.fleet = kind(health=self.health)
        self.workers: list[UnlinkedWorker] = []
        self.named = 0
        self.attempts: list[Attempt] = []
        self.prepared: list[ExitStack] = []
        for _ in range(self.random.choice((1, 2, 3, 8, 24))):
            self.join()

    def step(self) -> None:
        steps = [self.join, self.leave, self.retire, self.announce, self.wait, self.end, self.send]
        self.random.choice([*steps, self.prepare, self.prepare, *[self.fail] * 6, self.begin])()

    def join(self) -> None:
        self.workers.append(UnlinkedWorker(self.named))
        self.workers[-1].set_load(self.random.randint(0, 3))
        self.named += 1
        self.fleet.add(self.workers[-1])

    def leave(self) -> None:
        if len(self.workers) > 1:
            self.fleet.remove(self.workers.pop(self.random.randrange(len(self.workers))))

    def retire(self) -> None:
        worker = self.random.choice(self.workers)
        (self.fleet.restore if worker in self.fleet._leaving else self.fleet.retire)(worker)

    def announce(self) -> None:
        self.random.choice(self.workers).announce(self.random.sample(ITEMS, 2), gone=self.random.sample(ITEMS, 1))

    def wait(self) -> None:
        self.now += self.random.choice((1.0, 5.0, 10.0, 20.0))

    def fail(self) -> None:
        worker = self.random.choice(self.workers)
        attempt = self.health.begin(worker.name)
        self.health.charge(worker.name)
        self.health.fail(attempt)

    def begin(self) -> None:
        self.attempts.append(self.health.begin(self.random.choice(self.workers).name))

    def end(self) -> None:
        if self.attempts:
            attempt = self.attempts.pop(self.random.randrange(len(self.attempts)))
            self.random.choice((self.health.succeed, self.health.fail, self.health.cancel))(attempt)

    def prepare(self) -> None:
        if self.fleet.serving:
            self.prepared.append(stack := ExitStack())
            stack.enter_context(self.fleet.preparing(self.random.sample(ITEMS, 2)))

    def send(self) -> None:
        if self.prepared:
            self.prepared.pop(self.random.randrange(len(self.prepared))).close()

    def compare(self) -> bool:
        """Whether a random request goes to the same worker by both."""
        if not self.fleet.serving:
            return True
        digests, prefix = tuple(self.random.sample(ITEMS, self.random.randint(0, 3))), self.random.randbytes(4)
        without = self.random.sample(self.workers, self.random.randint(0, len(self.workers) - 1))
        if not set(self.fleet.serving) - set(without):
            return True
        expected = choose_by_scan(self.fleet, self.now, digests, prefix, without)
        return self.fleet.choose(digests, prefix=prefix, without=without) is expected


def available_by_scan(fleet: Fleet, now: float) -> list[RemoteWorker]:
    preparing = {worker.name for worker, pending in fleet._preparing.items() if pending.requests}
    names = set(scanned(fleet._health, [worker.name for worker in fleet._admitted], now, preparing))
    return [worker for worker in fleet._admitted if worker.name in names]


def choose_by_scan(
    fleet: Fleet, now: float, digests: tuple[Digest, ...], prefix: bytes, without: Iterable[RemoteWorker]
) -> RemoteWorker:
    """The choice as it was made by a look at every worker."""
    available = available_by_scan(fleet, now)
    left_out = fleet._set_of(without)
    serving = fleet._serving & ~left_out
    among = fleet._set_of(available) & ~left_out or serving
    if among.bit_count() == 1:
        return fleet._by_number[among.bit_length() - 1]
    fleet._refresh_loads()
    return fleet._by_number[fleet._balance.choose(among, digests, fleet._directory.holders(digests), prefix)]


def is_equal(seed: int, kind: type[Fleet] = Fleet) -> bool:
    """Whether all choices of a fleet's life are the same by both."""
    failing = FailingFleet(seed, kind)
    for _ in range(STEPS):
        failing.step()
        if not failing.compare():
            return False
    while failing.prepared:
        failing.send()
    return True


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, 1 << 32))
def test_choices_with_ejected_workers_are_those_of_a_look_at_every_worker(seed: int) -> None:
    assert is_equal(seed)


class _LeavesOutAll(Fleet):
    """A mutant: also when more than half are ejected."""

    def _left_out(self) -> int:
        return self._set_of(worker for worker in self._admitted if self.is_ejected(worker))


class _LeavesOutNobody(Fleet):
    def _left_out(self) -> int:
        return 0


class _OverlooksPreparing(Fleet):
    """A mutant: a trial in preparation is none."""

    def _is_preparing(self, name: str) -> bool:  # noqa: ARG002
        return False


@pytest.mark.parametrize("mutant", [_LeavesOutAll, _LeavesOutNobody, _OverlooksPreparing])
def test_a_wrong_set_is_found(mutant: type[Fleet]) -> None:
    assert not all(is_equal(seed, mutant) for seed in range(60))


def _with_one_ejected(workers: int, kind: type[Fleet]) -> Callable[[], object]:
    """A choice among so many workers, one of which is ejected."""
    health = FleetHealth(EjectionLimits(1), now=lambda: 0.0)
    fleet = kind([UnlinkedWorker(number) for number in range(workers)], health=health)
    health.fail(health.begin(fleet.workers[0].name))
    return lambda: fleet.choose(ITEMS, prefix=b"a conversation")


class _Scanning(Fleet):
    """The control: everybody is looked at."""

    def _left_out(self) -> int:
        return self._serving & ~self._set_of(available_by_scan(self, 0.0))


def best_s(choose: Callable[[], object], rounds: int = 100) -> float:
    """The least processor time of a choice."""
    times = []
    for _ in range(rounds):
        began = thread_time()
        choose()
        times.append(thread_time() - began)
    return min(times)


@pytest.mark.slow
def test_a_choice_with_one_ejected_of_a_thousand_costs_about_as_much_as_of_ten() -> None:
    """What is compared is the best of many, by the processor's time. Control: a look at everybody."""
    ten, thousand = (best_s(_with_one_ejected(workers, Fleet)) for workers in (10, 1_000))
    assert thousand < 10 * ten
    assert best_s(_with_one_ejected(1_000, _Scanning)) > 10 * ten
