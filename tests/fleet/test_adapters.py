"""Requests for an adapter go to the workers that have it."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from semel.core import Adapter
from semel.errors import NotReady
from semel.fleet.fleet import Fleet
from semel.wire.events import Reset
from tests.fleet.unlinked import UnlinkedWorker
from tests.wire.examples import digest_of

SQL, LAW = (Adapter(name, f"/{name}", "1", "tiny") for name in ("sql", "law"))


def load(worker: UnlinkedWorker, *adapters: Adapter) -> None:
    worker.adapters = adapters
    worker.on_change()


def test_a_worker_without_the_adapter_is_not_chosen_however_idle_it_is_and_whatever_it_holds() -> None:
    workers = [UnlinkedWorker(number) for number in range(3)]
    fleet, items = Fleet(workers), [digest_of(1)]
    load(workers[0], SQL)
    load(workers[1], SQL, LAW)
    workers[1].set_load(50)
    workers[2].announce(items)
    assert fleet.choose(items, adapter="law") is workers[1]
    assert fleet.choose(items) is workers[2]
    assert fleet.choose_holder(items, set(), adapter="sql") is None
    with ExitStack() as stack:
        chosen = {stack.enter_context(fleet.preparing(items, adapter="sql")) for _ in range(40)}
    assert chosen <= {workers[0], workers[1]}
    with pytest.raises(NotReady):
        fleet.choose(items, adapter="law", without=[workers[1]])
    assert fleet.adapters == {"sql": SQL, "law": LAW}


async def test_an_adapter_is_there_as_long_as_somebody_who_serves_has_it() -> None:
    workers = [UnlinkedWorker(number) for number in range(2)]
    fleet = Fleet(workers)
    load(workers[0], SQL)
    load(workers[1], SQL)
    workers[0]._lose(Reset("gone", "the connection broke"))
    assert fleet.choose((), adapter="sql") is workers[1]
    load(workers[1])
    assert not fleet.adapters
    with pytest.raises(NotReady):
        fleet.choose((), adapter="sql")


def test_other_weights_under_the_same_name_are_told(caplog: pytest.LogCaptureFixture) -> None:
    workers = [UnlinkedWorker(number) for number in range(2)]
    fleet = Fleet(workers)
    load(workers[0], SQL)
    load(workers[1], Adapter("sql", "/sql", "2", "tiny"))
    assert "other weights for the adapter 'sql'" in caplog.text
    assert list(fleet.adapters) == ["sql"]
