"""Pauses, resumes, sleep, aborts and new weights in any order and at the same time, over a model of vLLM's core.

No order may end a call never, lose a request, make a step without weights or with encoder outputs of old ones, or leave
frontends with another state than the core's. The clock is virtual: a call that never ends is seen at once.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Self, cast

import pytest

from semel.engine.progress import FIRST_STEPS, AwakeClock, StepWatch
from semel.engine.vllm.caches import EngineCaches
from semel.engine.vllm.compat.internals import watch_calls
from semel.engine.vllm.control import VllmControl
from semel.engine.vllm.requests.progress import Suspensions
from semel.errors import EngineFailed, InvalidRequest
from semel.lab.simulate.clock import run
from semel.worker.control import WorkerControl
from semel.worker.progress_watch import until_hung
from tests.engine.paced_core import STEP_S, Core, Llm

pytestmark = pytest.mark.slow  # it imports vLLM

ROUNDS = 150
PACE_S = (0.0, 0.0, 0.005, 0.03, 0.3)
PROGRESS_S = 5.0
WITHIN_S = 60.0
CHANGES = ("reload", "update_weights", "finish_weight_update")
MODES = ("abort", "wait", "keep")


class Free:
    """A lock that locks nothing."""

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, *_: object) -> None:
        pass


class Nothing:
    """A count that stays 0."""

    def __iadd__(self, _: object) -> Self:
        return self

    __isub__ = __iadd__

    def __bool__(self) -> bool:
        return False


class Rig:
    """A worker's control over a paced core, with requests that never cease to come."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.core = Core(self.rng)
        self.llm = Llm(self.core, self.rng)
        loop = asyncio.get_running_loop()
        self.watch = StepWatch(AwakeClock(loop.time))
        watch_calls(self.llm, Suspensions(self.watch).during)
        self.core.on_step = self._count
        items: Any = SimpleNamespace(clear=lambda: None)
        caches = EngineCaches(self.llm, items, cast("Any", None), asyncio.Lock())
        self.engine = VllmControl(self.llm, caches, None)
        self.told: list[bool] = []
        worker: Any = SimpleNamespace(
            set_paused=self.told.append, request_ids=lambda among=(): set(among), abort_waiting=lambda _: set()
        )
        self.control = WorkerControl(self.engine, worker)
        self.answers: list[asyncio.Future[str]] = []
        self.may_abort = self.knows_broken = False
        self.under_way: Counter[str] = Counter()
        self.releasing = self.released = 0
        """Calls after which steps may be made: under way, and until now."""

    async def traffic(self) -> None:
        """Ask without end, so that an engine which runs is never idle."""
        while True:
            self.ask(self.rng.randint(5, 30))
            await asyncio.sleep(3 * STEP_S)

    def ask(self, steps: int) -> asyncio.Future[str]:
        """Begin a request."""
        self.answers.append(self.llm.ask(steps))
        self._note_requests()
        return self.answers[-1]

    async def call(self, name: str, mode: Any = None) -> None:
        """Make a call of an operator's. It may be refused, or fail in the engine; it ends."""
        self.under_way[name] += 1
        self.may_abort |= name == "abort" or (name in ("pause", "sleep") and mode == "abort")
        try:
            await self._call(name, mode)
        finally:
            self.under_way[name] -= 1

    async def _call(self, name: str, mode: Any) -> None:
        control = self.control
        calls: dict[str, Callable[[], Any]] = {
            "pause": lambda: self._pausing(mode, control.pause(mode, clear_cache=self.rng.random() < 0.5)),
            "sleep": lambda: self._pausing(mode, control.sleep(self.rng.randint(0, 2), mode)),
            "resume": lambda: self._releasing(control.resume()),
            "wake_up": lambda: self._releasing(control.wake_up(self.rng.choice([None, ["weights"], ["kv_cache"]]))),
            "abort": lambda: control.abort_requests([str(self.rng.randint(1, len(self.answers) + 1))]),
            "reload": lambda: control.collective_rpc("reload_weights", (), {}, None),
        }
        if self.knows_broken and name in ("resume", "wake_up"):
            return  # it would end the engine, and its operator has been told
        async with asyncio.timeout(WITHIN_S):
            try:
                await (calls[name]() if name in calls else control.update_weights(cast("Any", name), {}))
            except InvalidRequest:
                pass
            except EngineFailed:
                self.knows_broken |= name in CHANGES
            else:
                self.knows_broken &= name not in CHANGES

    async def settle(self) -> None:
        """Have it run: good weights, nothing asleep, no pause."""
        self.core.model_executor.failing = 0
        await self.call("finish_weight_update")
        await self.call("reload")
        await self._releasing(self.control.wake_up(None))

    def check_state(self) -> None:
        """What frontends and the hang clock know is the core's state."""
        is_paused = self.core.is_scheduler_paused()
        found = {"told": self.told[-1], "clock stands": bool(self.watch._suspensions)}
        assert found == {"told": is_paused, "clock stands": is_paused}

    async def _pausing(self, mode: str, pause: Any) -> None:
        others, released = self.releasing, self.released
        if mode == "wait":
            await self._releasing(pause)  # what was kept goes on, to its end
        else:
            await pause
        if not others and self.releasing == 0 and self.released == released + (mode == "wait"):
            self.core.is_promised = True

    async def _releasing(self, call: Any) -> None:
        self.core.is_promised = False
        self.releasing += 1
        try:
            await call
        finally:
            self.releasing -= 1
            self.released += 1

    def _count(self) -> None:
        if self.core.is_scheduler_paused() and not +self.under_way - Counter(pause=99, sleep=99):
            assert self.told[-1], "requests still end, and frontends send others"
        self.watch.step()
        self._note_requests()

    def _note_requests(self) -> None:
        self.watch.set_requests(sum(not one.done() for one in self.answers))


CALLS = (
    *("pause", "pause", "resume", "resume", "sleep", "wake_up", "abort", "reload"),
    *("start_weight_update", "update_weights", "finish_weight_update"),
)


async def scenario(rig: Rig) -> None:
    """Make calls, some at the same time; then let it run, and wait for all answers."""
    traffic = asyncio.create_task(rig.traffic())
    calls = []
    for _ in range(rig.rng.randint(4, 16)):
        calls.append(asyncio.create_task(rig.call(rig.rng.choice(CALLS), rig.rng.choice(MODES))))
        await asyncio.sleep(rig.rng.choice(PACE_S))
    await asyncio.gather(*calls)
    if rig.told:
        rig.check_state()
    await rig.settle()
    assert not rig.core.is_scheduler_paused()
    rig.check_state()
    traffic.cancel()
    async with asyncio.timeout(WITHIN_S):
        reasons = {await answer for answer in rig.answers}
    assert reasons <= ({"length", "abort"} if rig.may_abort else {"length"})


async def with_core(rig: Rig, work: Any) -> None:
    """Do work while the core runs; what the core does not stand is the result."""
    core, doing = asyncio.create_task(rig.core.run()), asyncio.create_task(work)
    await asyncio.wait({core, doing}, return_when=asyncio.FIRST_COMPLETED)
    if core.done():
        core.result()
    doing.result()
    core.cancel()


def play(seed: int, change: Callable[[Rig], None] = lambda _: None) -> None:
    async def main() -> None:
        rig = Rig(seed)
        change(rig)
        await with_core(rig, scenario(rig))

    run(main())


@pytest.mark.parametrize("seeds", [range(first, first + 50) for first in range(0, ROUNDS, 50)], ids=str)
def test_any_order_of_calls_ends_loses_nothing_and_is_told_S22_B8(seeds: range) -> None:
    for seed in seeds:
        play(seed)


def unordered(rig: Rig) -> None:
    rig.engine._order = cast("Any", Free())


def never_overtaken(rig: Rig) -> None:
    rig.engine._pausing = cast("Any", _Forgetful())


def told_late(rig: Rig) -> None:
    rig.control._pauses = cast("Any", Nothing())


class _Forgetful(set[Any]):
    """A set of pauses that a resume does not find."""

    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize("change", [unordered, never_overtaken, told_late])
def test_control_that_lacks_one_of_its_orders_is_found_out(change: Callable[[Rig], None]) -> None:
    with pytest.raises((AssertionError, TimeoutError)):
        for seed in range(ROUNDS):
            play(seed, change)


WAITING = 64
PAUSE_S = 120.0


async def begin_all(rig: Rig) -> list[asyncio.Future[str]]:
    """Begin 64 requests at an engine that is past its first steps. A quarter of them runs."""
    await rig.ask(FIRST_STEPS + 1)
    asked = [rig.ask(50) for _ in range(WAITING)]
    await asyncio.sleep(20 * STEP_S)
    return asked


def watched(rig: Rig) -> asyncio.Task[str]:
    engine: Any = SimpleNamespace(progress=rig.watch, kill=lambda: None)
    return asyncio.create_task(until_hung(engine, PROGRESS_S))


@pytest.mark.parametrize("mode", MODES)
def test_a_pause_of_120_s_with_64_requests_is_no_hang_and_fails_none_S22(mode: Any) -> None:
    async def main() -> None:
        rig = Rig(0)
        await with_core(rig, work(rig))

    async def work(rig: Rig) -> None:
        asked = await begin_all(rig)
        hung = watched(rig)
        async with asyncio.timeout(WITHIN_S):
            await rig.control.pause(mode, clear_cache=True)
        later = rig.ask(5)
        steps, done = rig.core.steps, [one.result() for one in asked if one.done()]
        await asyncio.sleep(PAUSE_S)
        assert (rig.core.steps, hung.done(), later.done()) == (steps, False, False)
        assert done == {"keep": [], "wait": ["length"] * 16, "abort": ["abort"] * WAITING}[mode]
        await rig.control.resume()
        reasons = {await one for one in asked}
        assert reasons == {"abort" if mode == "abort" else "length"}
        assert await later == "length"
        assert not hung.done()
        rig.check_state()

    run(main())


def test_an_engine_that_makes_no_steps_without_a_pause_is_hung_also_after_one_S22() -> None:
    """The control: the same clock. A pause that a resume overtook leaves none of it behind."""

    async def main() -> None:
        rig = Rig(0)
        core = asyncio.create_task(rig.core.run())
        await begin_all(rig)
        pausing = asyncio.create_task(rig.control.pause("wait", clear_cache=True))
        await asyncio.sleep(4 * STEP_S)
        await rig.control.resume()
        with pytest.raises(InvalidRequest, match="resumed while"):
            await pausing
        core.cancel()
        async with asyncio.timeout(2 * PROGRESS_S):
            assert "engine_hung" in await watched(rig)

    run(main())
