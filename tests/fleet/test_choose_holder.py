"""The worker for items that a request only names: chosen by sets of workers as by a look at every worker."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.core import Digest
from semel.fleet.balance import Balance
from semel.fleet.fleet import Fleet
from semel.fleet.worker import RemoteWorker
from tests.effort import examples
from tests.fleet.test_left_out import ITEMS, STEPS, FailingFleet, available_by_scan, best_s
from tests.fleet.unlinked import UnlinkedWorker
from tests.wire.examples import digest_of


def choose_by_scan(
    fleet: Fleet, digests: Sequence[Digest], cached: Container[Digest], now: float = 0.0
) -> RemoteWorker | None:
    """The choice as it was made: every worker is looked at for every item."""
    lacking = {one: [digest for digest in digests if one.holding(digest) is None] for one in fleet.serving}
    able = [one for one, rest in lacking.items() if all(digest in cached for digest in rest)]
    if not able:
        return None
    available = [one for one in available_by_scan(fleet, now) if one in able]
    return min(available or able, key=lambda one: (len(lacking[one]), fleet.load(one)))


def is_equal(seed: int, kind: type[Fleet] = Fleet) -> bool:
    """Whether all choices of a fleet's life are the same by both."""
    failing, random = FailingFleet(seed, kind), Random(seed)
    for _ in range(STEPS):
        failing.step()
        failing.announce()
        digests, cached = random.sample(ITEMS, random.randint(1, 3)), random.sample(ITEMS, random.choice((0, 2, 6)))
        expected = choose_by_scan(failing.fleet, digests, cached, failing.now)
        if failing.fleet.choose_holder(digests, cached) is not expected:
            return False
    return True


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, 1 << 32))
def test_choices_are_those_of_a_look_at_every_worker_for_every_item(seed: int) -> None:
    assert is_equal(seed)


class _Uncached(Fleet):
    """A mutant: nothing is cached."""

    def choose_holder(self, digests: Iterable[Digest], cached: Container[Digest]) -> RemoteWorker | None:  # noqa: ARG002
        return super().choose_holder(digests, ())


class _Forgiving(Fleet):
    """A mutant: ejected workers are as good as others."""

    def _left_out(self) -> int:
        return 0


class _Restless(Fleet):
    """A mutant: loads are not looked at."""

    def _refresh_loads(self) -> None: ...


@pytest.mark.parametrize("mutant", [_Uncached, _Forgiving, _Restless])
def test_a_wrong_choice_is_found(mutant: type[Fleet]) -> None:
    assert not all(is_equal(seed, mutant) for seed in range(60))


def test_a_choice_that_overlooks_who_holds_most_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Balance, "best_holders", lambda self, among, _: self._least_busy(among))
    assert not all(is_equal(seed) for seed in range(60))


def _named(workers: int, choose: Callable[[Fleet, Sequence[Digest], Container[Digest]], object]) -> float:
    """The time of a choice for 50 items, all cached, that one of so many workers has."""
    digests = [digest_of(number) for number in range(50)]
    made = [UnlinkedWorker(number) for number in range(workers)]
    made[workers // 2].announce(digests)
    fleet, cached = Fleet(made), set(digests)
    assert choose(fleet, digests, cached) is made[workers // 2]
    return best_s(lambda: choose(fleet, digests, cached), 20)


def test_a_choice_among_many_workers_costs_about_as_much_as_one_among_few() -> None:
    """What is compared is the best of many, by the processor's time. Control: a look at every worker."""
    few = _named(5, Fleet.choose_holder)
    assert _named(500, Fleet.choose_holder) < 10 * few
    assert _named(500, choose_by_scan) > 10 * few
