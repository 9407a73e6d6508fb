"""A worker whose engine hangs: it ends the engine and itself, and its frontends are told why (S22)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from semel.engine.progress import FIRST_STEPS, AwakeClock
from semel.errors import EngineDead, EngineHung, WorkerLost
from semel.lab.testing.engine import EchoEngine
from semel.wire.events import Reset
from semel.wire.zmq import Connected, FrontendLink, WorkerListener
from semel.worker import progress_watch
from semel.worker.worker import Worker
from tests.waiting import until
from tests.wire.examples import CONTRACT, KEY
from tests.worker.pairing import ITEM_BYTES, Rig, rig

LIMIT_S = 0.3


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_watch, "_LOOK_S", 0.02)


@asynccontextmanager
async def watched(folder: Path, progress_s: float = LIMIT_S) -> AsyncIterator[tuple[Rig, asyncio.Task[None]]]:
    """A worker that has made its first steps, and the task that runs it."""
    async with rig(folder, progress_s=progress_s) as one:
        for _ in range(FIRST_STEPS):
            await one.frontends[0].ask(1)
        (running,) = [task for task in asyncio.all_tasks() if " Worker.run" in str(task.get_coro())]
        yield one, running


async def test_an_engine_without_a_step_is_killed_and_the_worker_ends_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with watched(tmp_path) as (one, running):
        one.engine.hangs = True
        with pytest.raises(WorkerLost):
            await one.frontends[0].ask(1)
        async with asyncio.timeout(5):
            with pytest.raises(EngineHung, match="engine_hung: the engine has made no step"):
                await running
        assert one.engine.killed
        assert "engine_hung" in one.worker.reason
        assert "engine_hung" in caplog.text
        assert "--engine-progress-s 0.3" in caplog.text
        assert "hung" in one.frontends[0].worker.reason


@pytest.mark.parametrize("case", ["idle", "switched off", "suspended", "aborted", "first steps"])
async def test_what_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Control: the test above, which differs in nothing else."""
    now = [0.0]
    async with watched(tmp_path, 0.0 if case == "switched off" else LIMIT_S) as (one, running):
        progress = one.engine.progress
        monkeypatch.setattr(progress, "clock", AwakeClock(lambda: now[0], max_gap_s=100.0))
        one.engine.hangs = True
        if case == "first steps":
            progress.steps = FIRST_STEPS - 1
        if case == "suspended":
            progress.suspend()
        if case != "idle":
            asking = asyncio.create_task(one.frontends[0].ask(1))
            await until(lambda: progress._requests > 0)
            if case == "aborted":
                now[0] = LIMIT_S / 2
                asking.cancel()
                await until(lambda: progress._requests == 0)
        now[0] = 60.0
        await asyncio.sleep(0.2)  # ten looks
        assert not running.done()
        assert not one.engine.killed
        one.engine.hangs = False
        if case not in ("idle", "aborted"):
            assert await asking
            assert not running.done()


@pytest.mark.parametrize(("gap_s", "is_hung"), [(2.0, False), (100.0, True)], ids=["shipped", "control"])
async def test_a_loop_that_is_busy_is_not_the_engines_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gap_s: float, is_hung: bool
) -> None:
    """Control: a clock on the wall, by which the engine has made no step for 4 s."""
    now = [0.0]
    async with watched(tmp_path, 3.0) as (one, running):
        monkeypatch.setattr(one.engine.progress, "clock", AwakeClock(lambda: now[0], max_gap_s=gap_s))
        one.engine.hangs = True
        asking = asyncio.create_task(one.frontends[0].ask(1))
        await asyncio.sleep(0.1)
        now[0] = 4.0
        await asyncio.sleep(0.2)
        assert running.done() == is_hung
        asking.cancel()
        with suppress(asyncio.CancelledError, WorkerLost):
            await asking


@pytest.mark.parametrize("fault", ["death", "hang"])
async def test_frontends_are_told_how_the_engine_ended(tmp_path: Path, fault: str) -> None:
    """Also one that has no request there: by the code of the last message."""
    engine = EchoEngine(replace(CONTRACT, cache_bytes=4 * ITEM_BYTES))
    address = f"ipc://{tmp_path}/w.sock"
    async with WorkerListener(address, key=KEY, contract=engine.contract) as listener:
        worker = Worker(engine, listener, progress_s=LIMIT_S)
        running = asyncio.create_task(worker.run())
        async with FrontendLink(address, key=KEY, frontend_id="f") as link:
            assert isinstance(await anext(aiter(link)), Connected)
            if fault == "death":
                worker._died.set()
            else:
                engine.progress.steps = FIRST_STEPS
                engine.progress.set_requests(1)
            error = EngineDead if fault == "death" else EngineHung
            with pytest.raises(error):
                await running
            async with asyncio.timeout(5):
                async for event in link:
                    if isinstance(event, Reset):
                        assert event.code == error.code
                        break
