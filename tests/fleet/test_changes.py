"""What a frontend does when a worker comes or goes, and that it does nothing while one stays away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from semel.compose.frontend import keep_serving
from semel.core import Contract
from semel.fleet.fleet import Fleet
from semel.fleet.worker import RemoteWorker
from semel.frontend.service import FrontendState, ServedModel
from semel.render import Pipeline
from semel.wire.events import Closed, Reset
from semel.wire.limits import Deadlines
from semel.wire.zmq import Backoff, FrontendLink
from tests.fleet.workers import several
from tests.waiting import until
from tests.wire.examples import KEY
from tests.worker.pairing import rig

ATTEMPTS = 8
SOON = Deadlines(handshake_s=0.02)
OFTEN = Backoff(first_s=0.01, max_s=0.02)


class CountingFleet(Fleet):
    reviews = 0

    def _review(self) -> None:
        self.reviews += 1
        super()._review()


class Restless(RemoteWorker):
    """The control: every failed attempt to reach it is reported."""

    def _become(self, contract: Contract | None, reason: str) -> None:
        self._contract, self.reason = contract, reason
        self.on_change()


@asynccontextmanager
async def one_is_dead(
    folder: Path, kind: type[RemoteWorker], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[CountingFleet, list[object]]]:
    """A fleet of a worker that serves and one that is not there, and the failures to reach the second."""
    failures: list[object] = []

    def lose(self: RemoteWorker, event: Closed | Reset) -> None:
        failures.append(event)
        real_lose(self, event)

    real_lose = RemoteWorker._lose
    monkeypatch.setattr(RemoteWorker, "_lose", lose)
    nobody = FrontendLink(f"ipc://{folder}/nobody.sock", key=KEY, frontend_id="f", deadlines=SOON, backoff=OFTEN)
    async with rig(folder) as alive, nobody as link:
        dead = kind(link)
        running = asyncio.create_task(dead.run())
        try:
            yield CountingFleet([alive.frontends[0].worker, dead]), failures
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def _reviews(folder: Path, kind: type[RemoteWorker], monkeypatch: pytest.MonkeyPatch) -> int:
    """Reviews of the fleet from the first failure to reach a worker to the last."""
    async with one_is_dead(folder, kind, monkeypatch) as (fleet, failures):
        await until(lambda: len(failures) >= 1)
        before = fleet.reviews
        await until(lambda: len(failures) >= ATTEMPTS)
        assert len(fleet.serving) == 1
        return fleet.reviews - before


async def test_a_worker_that_stays_away_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await _reviews(tmp_path, RemoteWorker, monkeypatch) == 0


async def test_control_every_failed_attempt_reviews_the_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await _reviews(tmp_path, Restless, monkeypatch) >= ATTEMPTS - 1


async def _log_always(fleet: Fleet, service: FrontendState, pipeline: Pipeline) -> None:
    """The control: a line for every change."""
    while True:
        await fleet.changed()
        if (contract := fleet.contract) is None:
            service.suspend(fleet.reason)
        else:
            service.begin(ServedModel(fleet, contract, pipeline))
            counts = len(fleet.serving), len(fleet.workers)
            logging.getLogger(__name__).info("serving %s with %d of %d workers", contract.model, *counts)


@pytest.mark.parametrize(
    ("keep", "lines"), [(keep_serving, [(2, 2), (1, 2), (1, 2)]), (_log_always, [(2, 2)] * 2 + [(1, 2)] * 4)]
)
async def test_the_log_says_how_many_serve_when_that_changes(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    keep: Callable[[Fleet, FrontendState, Pipeline], Coroutine[Any, Any, None]],
    lines: list[tuple[int, int]],
) -> None:
    """Also when as many serve as before, and nobody did meanwhile. Control: a line for every change."""
    caplog.set_level(logging.INFO)
    service = FrontendState()
    async with several(tmp_path) as rigs, AsyncExitStack() as stack:
        workers = [one.frontends[0].worker for one in rigs]
        fleet = Fleet(workers)
        keeping = asyncio.create_task(keep(fleet, service, cast("Pipeline", None)))
        stack.callback(keeping.cancel)
        a, b = workers
        review = partial(fleet.admit, lambda _: None)
        changes: list[Callable[[], None]] = [fleet._changed.set, review, partial(fleet.retire, a), review]
        changes += [partial(fleet.retire, b), partial(fleet.restore, a), review]
        for change in changes:
            change()
            await until(lambda: not fleet._changed.is_set())
            await asyncio.sleep(0)
    found = [record.args for record in caplog.records if "serving %s with" in record.msg]
    assert [args[1:] for args in found if isinstance(args, tuple)] == lines
