"""Nothing is left of a worker that is removed while a request is prepared for it or under way."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from semel.core import Digest, Feature, Submission
from semel.errors import EngineFailed, NotReady
from semel.fleet import fleet as fleets
from semel.fleet.ejection import Attempt, EjectionLimits, OutlierEjection
from semel.fleet.fleet import Fleet
from semel.fleet.pending import PendingRequests
from semel.fleet.retry_policy import FleetHealth, RetryPolicy
from semel.fleet.worker import RemoteWorker
from tests.fleet.test_worker_faults import three
from tests.fleet.unlinked import UnlinkedWorker
from tests.fleet.workers import Workers
from tests.wire.examples import digest_of
from tests.worker.pairing import expected, feature, prompt

__all__ = ["three"]

A, B = digest_of(1), digest_of(2)


class _Lasting(PendingRequests):
    """The control: what is prepared for a worker that was removed goes on under its number."""

    def leave(self) -> None: ...


def _pending_of_the_next(kind: type[PendingRequests], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Items that a new worker is taken to be about to get, and whether it still is when the old one's request ends."""
    monkeypatch.setattr(fleets, "PendingRequests", kind)
    fleet = Fleet([old := UnlinkedWorker(0)])
    pending = fleet._directory.pending
    with ExitStack() as first, ExitStack() as second:
        assert first.enter_context(fleet.preparing([A, B])) is old
        fleet.remove(old)
        fleet.add(new := UnlinkedWorker(1))
        assert fleet._numbers[new] == 0, "the number is free"
        found = [len(pending)]
        assert second.enter_context(fleet.preparing([B])) is new
        first.close()
        found.append(len(pending))
    assert not len(pending)
    return found


def test_what_is_prepared_for_a_removed_worker_is_not_taken_for_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _pending_of_the_next(PendingRequests, monkeypatch) == [0, 1]
    assert _pending_of_the_next(_Lasting, monkeypatch) == [2, 0], "control"


async def _make(_: Digest) -> Feature:
    return feature(1)


class _Early(Fleet):
    """The control: an attempt begins before it is clear that its worker serves."""

    def _check_serving(self, worker: RemoteWorker, policy: RetryPolicy, adapter: str | None) -> None:
        self._health.begin(worker.name)
        super()._check_serving(worker, policy, adapter)


@pytest.mark.parametrize(("kind", "records"), [(Fleet, 0), (_Early, 1)])
async def test_a_request_for_a_removed_worker_leaves_no_record_of_it(kind: type[Fleet], records: int) -> None:
    health = FleetHealth(EjectionLimits(1))
    fleet = kind([worker := UnlinkedWorker(0)], health=health)
    with fleet.preparing([A]):
        fleet.remove(worker)
        with pytest.raises(NotReady, match="leaves the fleet"):
            await fleet.submit(worker, Submission("r", prompt([1]), {}), _make)
    assert len(health._records) == records


class _Charging(OutlierEjection):
    """The control: a failure makes a record, whoever it is of."""

    def charge(self, worker: str) -> None:
        self.begin(worker)
        super().charge(worker)


@pytest.mark.parametrize(("kind", "records"), [(OutlierEjection, 0), (_Charging, 1)])
def test_a_failure_of_a_removed_worker_leaves_no_record_of_it(kind: type[OutlierEjection], records: int) -> None:
    ejection = kind()
    attempt: Attempt = ejection.begin("a")
    ejection.forget("a")
    ejection.charge("a")
    assert ejection.fail(attempt) == 0.0
    assert (len(ejection._records), len(ejection.charged)) == (records, records)


async def test_a_request_for_a_removed_worker_is_answered_by_another(three: Workers) -> None:
    gone = three.fleet.workers[0]
    three.fleet.remove(gone)
    assert await three.ask(gone) == expected([1])
    assert three.metric("semel_failovers_total") == 1


@pytest.mark.parametrize("is_mutant", [False, True])
async def test_the_other_worker_is_the_last_one_and_counts_the_items(
    three: Workers,
    monkeypatch: pytest.MonkeyPatch,
    is_mutant: bool,
) -> None:
    """Control: if it were the first one, a third would be expected to count them."""
    if is_mutant:
        monkeypatch.setattr(RetryPolicy, "pass_over", lambda _: None)
    for one in three.rigs:
        one.engine.fault = "first_token"
    gone = three.fleet.workers[0]
    three.fleet.remove(gone)
    with pytest.raises(EngineFailed):
        await three.ask(gone)
    assert sum(one.engine.submissions for one in three.rigs) == 1
    assert three.queries == (0 if is_mutant else 1), "D8"
