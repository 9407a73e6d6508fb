"""Turns at the engine, with the worker as it is shipped, over real sockets."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from semel.core import Prompt, Submission, Tenant, Timeline
from semel.errors import NotReady, RequestError, SemelError
from semel.fairness.turns import EngineWindow
from semel.fleet.stream import RemoteStream
from semel.telemetry.meter import Metric
from semel.telemetry.metrics import ENGINE_SEQUENCES, ENGINE_WAITING, INTAKE_BYTES
from semel.worker.turns import EngineTurns
from tests.waiting import until
from tests.wire.examples import CONTRACT, digest_of
from tests.worker.pairing import ITEM_BYTES, Frontend, Rig, prompt, rig
from tests.worker.stepping import SteppedEngine

SEQUENCES = 8
WINDOW = EngineWindow(SEQUENCES, step_tokens=1_000)
PLACES = SEQUENCES + WINDOW.lead
IDS = itertools.count()


@dataclass
class Shop:
    """A worker with an engine of eight sequences, and two frontends."""

    rig: Rig
    engine: SteppedEngine

    @property
    def frontend(self) -> Frontend:
        return self.rig.frontends[0]

    def metric(self, metric: Metric) -> float:
        return next(value for one, value, _ in self.rig.worker.samples() if one is metric)

    @property
    def waiting(self) -> float:
        return self.metric(ENGINE_WAITING)

    async def submit(
        self, tenant: str, *items: int, frontend: int = 0, priority: int = 0, **sampling: object
    ) -> RemoteStream:
        prompted = prompt(items) if items else Prompt((1, 2, 3), Timeline.decoder(()), ())
        salt = Tenant(tenant).prefix_salt
        submission = Submission(f"{tenant}-{next(IDS)}", prompted, {}, sampling, salt, priority=priority)
        chosen = self.rig.frontends[frontend]
        return await chosen.worker.submit(submission, chosen.make)

    async def ask(self, tenant: str, *items: int, frontend: int = 0, priority: int = 0, **sampling: object) -> int:
        """The number of tokens of an answer."""
        stream = await self.submit(tenant, *items, frontend=frontend, priority=priority, **sampling)
        try:
            return sum([len(output.token_ids) async for output in stream])
        finally:
            await stream.close()

    def start(
        self, tenant: str, count: int, *items: int, frontend: int = 0, **sampling: object
    ) -> list[asyncio.Task[int]]:
        asking = (self.ask(tenant, *items, frontend=frontend, priority=0, **sampling) for _ in range(count))
        return [asyncio.create_task(one) for one in asking]


@asynccontextmanager
async def shop(folder: Path, window: EngineWindow | None = WINDOW, *, is_stepping: bool = True) -> AsyncIterator[Shop]:
    engine = SteppedEngine(replace(CONTRACT, cache_bytes=4 * ITEM_BYTES), SEQUENCES)
    async with rig(folder, frontends=2, engine=engine, window=window) as made:
        stepping = asyncio.create_task(engine.steps()) if is_stepping else None
        try:
            yield Shop(made, engine)
        finally:
            if stepping is not None:
                stepping.cancel()


async def is_quiet(shop: Shop) -> None:
    """Wait until nothing is left of any request."""
    await until(lambda: (shop.waiting, shop.metric(ENGINE_SEQUENCES), shop.metric(INTAKE_BYTES)) == (0, 0, 0))
    assert not shop.engine.streams


async def test_the_engine_gets_its_window_and_all_are_answered(tmp_path: Path) -> None:
    async with shop(tmp_path) as made:
        tasks = made.start("acme", 60)
        assert await asyncio.gather(*tasks) == [4] * 60
        assert made.engine.most == PLACES
        await is_quiet(made)


async def test_without_names_everything_goes_to_the_engine_in_order_of_arrival(tmp_path: Path) -> None:
    async with shop(tmp_path, is_stepping=False) as made:
        tasks = made.start("", 60)
        await until(lambda: made.engine.sequences == 60)
        numbers = [int(request_id.rpartition("-")[2]) for request_id in made.engine.arrivals]
        assert numbers == sorted(numbers)
        assert made.waiting == 0
        for _ in range(60):
            made.engine.advance()
        await asyncio.gather(*tasks)
        await is_quiet(made)


@pytest.mark.parametrize("way", ["abort", "loss"])
async def test_whoever_stops_waiting_leaves_the_queue(tmp_path: Path, way: str) -> None:
    async with shop(tmp_path, is_stepping=False) as made:
        long = made.start("acme", 20, frontend=1, max_tokens=9)
        await until(lambda: made.waiting == 20 - PLACES)
        if way == "abort":
            for task in long:
                task.cancel()
        else:
            for peer in list(made.rig.worker._frontends):
                if peer.frontend_id == "f1":
                    made.rig.worker._dismiss(peer, "a test ends it")
        await asyncio.gather(*long, return_exceptions=True)
        await is_quiet(made)
        (short,) = made.start("globex", 1)
        await until(lambda: made.engine.sequences == 1)
        for _ in range(4):
            made.engine.advance()
        assert await short == 4


async def test_an_engine_that_fails_requests_frees_their_places(tmp_path: Path) -> None:
    async with shop(tmp_path, is_stepping=False) as made:
        tasks = made.start("acme", 40)
        failed = 0
        while failed < 40:
            await until(lambda: bool(made.engine.streams))
            for stream in list(made.engine.streams):
                stream.fail()
                made.engine.end(stream)
                failed += 1
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, SemelError) for one in outcomes)
        await is_quiet(made)
        made.engine.fault = "submission"
        outcomes = await asyncio.gather(*made.start("acme", 40), return_exceptions=True)
        assert all(isinstance(one, SemelError) for one in outcomes)
        await is_quiet(made)


async def test_items_that_are_lost_while_a_request_waits_or_later_are_sent_and_its_place_is_kept(
    tmp_path: Path,
) -> None:
    async with shop(tmp_path, is_stepping=False) as made:
        (first,) = made.start("acme", 1, 1)
        await until(lambda: made.engine.sequences == 1)
        await made.rig.knows(made.frontend, 1)
        others = made.start("acme", PLACES - 1)
        await until(lambda: made.engine.sequences == PLACES)
        (evicted,) = made.start("acme", 1, 1)
        await until(lambda: made.waiting == 1)
        await made.engine.reset()
        for _ in range(8):
            made.engine.advance()
        await asyncio.gather(first, *others)
        await until(lambda: made.engine.sequences == 1)
        assert made.rig.worker.needs == 1
        for _ in range(4):
            made.engine.advance()
        assert await evicted == 4
        await made.rig.knows(made.frontend, 1)
        made.engine.lost.add(digest_of(1))
        (lost,) = made.start("acme", 1, 1)
        await until(lambda: made.engine.sequences == 1)
        assert made.rig.worker.resubmissions == 1
        assert made.metric(ENGINE_SEQUENCES) == 1
        for _ in range(4):
            made.engine.advance()
        assert await lost == 4
        await is_quiet(made)


async def test_a_worker_that_drains_answers_what_waits(tmp_path: Path) -> None:
    async with shop(tmp_path) as made:
        tasks = made.start("acme", 60)
        await until(lambda: made.waiting > 0)
        await made.rig.worker.drain(20.0)
        assert await asyncio.gather(*tasks) == [4] * 60


@pytest.mark.parametrize(
    ("window", "sampling"),
    [
        (replace(WINDOW, max_sequences=20), {}),
        (replace(WINDOW, max_sequences=40), {"n": 2}),
        (replace(WINDOW, max_prompt_tokens=60), {}),
    ],
)
async def test_what_waits_here_counts_against_the_limits_of_the_engine_s_queue(
    tmp_path: Path, window: EngineWindow, sampling: dict[str, int]
) -> None:
    async with shop(tmp_path, window, is_stepping=False) as made:
        tasks = made.start("acme", 20, **sampling)
        await until(lambda: made.waiting + len(made.engine.streams) == 20)
        with pytest.raises(NotReady, match="--max-num-queued-reqs"):
            await made.ask("globex")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await is_quiet(made)


async def test_answers_of_one_request_take_a_place_each_until_each_has_ended(tmp_path: Path) -> None:
    async with shop(tmp_path, is_stepping=False) as made:
        (wide,) = made.start("acme", 1, n=7)
        await until(lambda: made.metric(ENGINE_SEQUENCES) == 7 and bool(made.engine.streams))
        made.engine.streams[0].left[3] = 1
        made.engine.advance()
        await until(lambda: made.metric(ENGINE_SEQUENCES) == 6)
        for _ in range(3):
            made.engine.advance()
        assert await wide == 25
        await is_quiet(made)


async def test_a_request_of_a_tenant_that_would_fill_the_engine_is_refused_and_without_names_it_is_not(
    tmp_path: Path,
) -> None:
    async with shop(tmp_path) as made:
        limit = WINDOW.common_places
        assert await made.ask("acme", n=limit) == 4 * limit
        for wide in (limit + 1, 128):
            with pytest.raises(RequestError, match=f"n is {wide}: .* at most {limit} answers"):
                await made.ask("acme", n=wide)
        assert await made.ask("", n=128) == 4 * 128  # the control: nobody else is there who could wait for it
        await is_quiet(made)


async def test_a_request_whose_grammar_is_compiled_takes_no_place_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with shop(tmp_path) as made:
        compiled = asyncio.Event()

        async def prepare(submission: Submission) -> Submission:
            if "structured_outputs" in submission.sampling:
                await compiled.wait()
            return submission

        monkeypatch.setattr(made.engine, "prepare", prepare)
        constrained = made.start("acme", 2 * PLACES, structured_outputs={"regex": "a"})
        await until(lambda: sum(map(len, made.rig.worker._frontends.values())) == 2 * PLACES)
        assert await asyncio.gather(*made.start("acme", 20), *made.start("globex", 20)) == [4] * 40
        assert made.metric(ENGINE_SEQUENCES) == 0
        compiled.set()
        assert await asyncio.gather(*constrained) == [4] * 2 * PLACES
        await is_quiet(made)


async def test_within_a_tenant_priority_decides(tmp_path: Path) -> None:
    async with shop(tmp_path, is_stepping=False) as made:
        running = made.start("acme", PLACES)
        await until(lambda: made.engine.sequences == PLACES)
        late = asyncio.create_task(made.ask("acme", priority=3))
        await until(lambda: made.waiting == 1)
        early = asyncio.create_task(made.ask("acme", priority=-3))
        await until(lambda: made.waiting == 2)
        while len(made.engine.arrivals) < PLACES + 2:
            made.engine.advance()
            await asyncio.sleep(0.001)
        *_, second_last, last = (int(one.rpartition("-")[2]) for one in made.engine.arrivals)
        assert second_last > last  # the one that came last began first
        for _ in range(20):
            made.engine.advance()
        assert await asyncio.gather(*running, late, early) == [4] * (PLACES + 2)


async def test_a_request_that_is_cancelled_in_the_moment_of_its_turn_takes_no_place() -> None:
    turns = EngineTurns(EngineWindow(1, 1_000))
    one = Submission("one", Prompt((1, 2, 3), Timeline.decoder(()), ()), {}, {}, Tenant("acme").prefix_salt)
    first, _ = await turns.take(one), await turns.take(one)
    waiting = asyncio.create_task(turns.take(one))
    await asyncio.sleep(0)
    assert {metric: value for metric, value, _ in turns.samples()} == {ENGINE_SEQUENCES: 2, ENGINE_WAITING: 1}
    turns.release(first)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert {metric: value for metric, value, _ in turns.samples()} == {ENGINE_SEQUENCES: 1, ENGINE_WAITING: 0}
    async with asyncio.timeout(30):
        await turns.take(one)


def test_the_window_is_that_of_vllm_s_scheduler() -> None:
    from types import SimpleNamespace

    from semel.engine.vllm.engine import engine_window

    scheduler = SimpleNamespace(
        max_num_seqs=256,
        max_num_active_seqs=None,
        max_num_batched_tokens=8192,
        max_num_scheduled_tokens=None,
        max_num_queued_reqs=None,
        max_num_queued_tokens=9,
    )
    window = engine_window(SimpleNamespace(scheduler_config=scheduler))
    assert window == EngineWindow(256, 8192, None, 9)
    assert (window.lead, window.common_places, window.prompt_tokens) == (16, 224, 32768)
    scheduler.max_num_active_seqs, scheduler.max_num_scheduled_tokens = 64, 1024
    assert engine_window(SimpleNamespace(scheduler_config=scheduler)) == EngineWindow(64, 1024, None, 9)
    assert [window.ends(tokens) for tokens in (1, 4, 16, 1_000, None)] == [128, 128, 32, 0, 0]
