"""A choice among workers, some of them ejected, is that of a look at every worker, and costs less."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import ExitStack
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.core import Digest
from semel.fleet.balance import Balance
from semel.fleet.ejection import Attempt, EjectionLimits
from semel.fleet.fleet import Fleet
from semel.fleet.retry_policy import FleetHealth
from semel.fleet.worker import RemoteWorker
from tests.effort import examples
from tests.fleet.test_ejection import scanned
from tests.fleet.unlinked import UnlinkedWorker
from tests.operations import operations
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

    def compare_holders(self) -> bool:
        """Whether a request that only names items goes to the same worker by both."""
        self.announce()
        digests = self.random.sample(ITEMS, self.random.randint(1, 3))
        cached = self.random.sample(ITEMS, self.random.choice((0, 2, 6)))
        return self.fleet.choose_holder(digests, cached) is holder_by_scan(self.fleet, digests, cached, self.now)


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


def holder_by_scan(
    fleet: Fleet, digests: Sequence[Digest], cached: Container[Digest], now: float = 0.0
) -> RemoteWorker | None:
    """The same for items that a request only names: every worker is looked at for every item."""
    lacking = {one: [digest for digest in digests if one.holding(digest) is None] for one in fleet.serving}
    able = [one for one, rest in lacking.items() if all(digest in cached for digest in rest)]
    if not able:
        return None
    available = [one for one in available_by_scan(fleet, now) if one in able]
    return min(available or able, key=lambda one: (len(lacking[one]), fleet.load(one)))


def is_equal(seed: int, kind: type[Fleet] = Fleet) -> bool:
    """Whether all choices of a fleet's life are the same by both."""
    failing = FailingFleet(seed, kind)
    for _ in range(STEPS):
        failing.step()
        if not (failing.compare() and failing.compare_holders()):
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


class _Uncached(Fleet):
    """A mutant: nothing is cached."""

    def choose_holder(
        self,
        digests: Iterable[Digest],
        cached: Container[Digest],  # noqa: ARG002
        **options: Any,
    ) -> RemoteWorker | None:
        return super().choose_holder(digests, (), **options)


class _Restless(Fleet):
    """A mutant: loads are not looked at."""

    def _refresh_loads(self) -> None: ...


@pytest.mark.parametrize("mutant", [_Uncached, _Restless, _LeavesOutAll, _LeavesOutNobody, _OverlooksPreparing])
def test_a_wrong_set_is_found(mutant: type[Fleet]) -> None:
    assert not all(is_equal(seed, mutant) for seed in range(60))


def test_a_choice_that_overlooks_who_holds_most_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Balance, "best_holders", lambda self, among, _: self._least_busy(among))
    assert not all(is_equal(seed) for seed in range(60))


def cost_of_a_choice(workers: int, choose: Callable[[Fleet, Sequence[Digest], Container[Digest]], object]) -> int:
    """The operations of a choice for 50 items, all cached, that one of so many workers has."""
    digests = [digest_of(number) for number in range(50)]
    made = [UnlinkedWorker(number) for number in range(workers)]
    made[workers // 2].announce(digests)
    fleet, cached = Fleet(made), set(digests)
    assert choose(fleet, digests, cached) is made[workers // 2]
    return operations(lambda: choose(fleet, digests, cached))


def test_a_choice_among_many_workers_costs_about_as_much_as_one_among_few() -> None:
    """Control: a look at every worker."""
    few = cost_of_a_choice(5, Fleet.choose_holder)
    assert cost_of_a_choice(500, Fleet.choose_holder) < 10 * few
    assert cost_of_a_choice(500, holder_by_scan) > 10 * few
