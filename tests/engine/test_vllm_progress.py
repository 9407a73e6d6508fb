"""What vLLM says of its steps and of what keeps it from them, and the end of its processes; without a model."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from math import inf
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from semel.engine.progress import AwakeClock, StepWatch
from semel.engine.vllm.requests.progress import StepCounter, Suspensions, kill_processes
from tests.waiting import until


class Client:
    """The part of vLLM's client that is watched: outputs of steps, and calls into the engine core."""

    def __init__(self) -> None:
        self.outputs: asyncio.Queue[object] = asyncio.Queue()
        self.release = asyncio.Event()

    async def get_output_async(self) -> object:
        return await self.outputs.get()

    async def call_utility_async(self, method: str, *args: object) -> object:
        return await self._call_utility_async(method, *args, engine=b"")

    async def _call_utility_async(self, method: str, *_: object, engine: bytes) -> object:
        assert engine == b""
        await self.release.wait()
        return method != "wake_up" or "whole"


class Llm:
    """An `AsyncLLM` with requests that a test makes up."""

    def __init__(self, *, log_stats: bool = True) -> None:
        self.engine_core = Client()
        self.log_stats = log_stats
        self.requests = 0

    def get_num_unfinished_requests(self) -> int:
        return self.requests


def timed(counter: StepCounter, now: list[float]) -> StepWatch:
    counter.watch.clock = AwakeClock(lambda: now[0], max_gap_s=inf)
    return counter.watch


async def test_every_output_of_the_engine_core_is_a_step_and_requests_are_counted_when_it_is_handed_out() -> None:
    llm, now = Llm(), [0.0]
    counter = StepCounter(llm)
    watch = timed(counter, now)

    async def hand_out() -> None:
        while True:
            if await llm.engine_core.get_output_async() == "last":
                llm.requests = 0

    handling = asyncio.create_task(hand_out())
    llm.requests = 2
    counter.review()
    now[0] = 5.0
    assert watch.waited_s == 5.0
    llm.engine_core.outputs.put_nowait("a chunk of a prompt")
    await until(lambda: watch.steps == 1)
    assert (watch.waited_s, watch.longest_s) == (0.0, 5.0)
    llm.engine_core.outputs.put_nowait("last")
    await until(lambda: watch.steps == 2)
    now[0] = 100.0
    assert watch.waited_s == 0.0, "nobody may have read the answer, but the engine owes no step"
    handling.cancel()


async def test_an_engine_without_statistics_is_never_hung() -> None:
    """It does not report all its steps. Control: with statistics the clock runs."""
    for log_stats, waits_s in ((False, 0.0), (True, 50.0)):
        llm, now = Llm(log_stats=log_stats), [0.0]
        counter = StepCounter(llm)
        watch = timed(counter, now)
        llm.requests = 1
        counter.review()
        now[0] = 50.0
        assert watch.waited_s == waits_s


@pytest.mark.parametrize(
    ("calls", "waits_s"),
    [
        (("pause_scheduler", "resume_scheduler"), 0.0),
        (("sleep", "wake_up"), 0.0),
        (("collective_rpc.start_weight_update", "collective_rpc.finish_weight_update"), 0.0),
        (("collective_rpc.start_weight_update", "resume_scheduler"), 0.0),
        (("pause_scheduler", "wake_up"), 0.0),
        (("reset_mm_cache", "reset_prefix_cache"), 10.0),
        (("resume_scheduler", "wake_up"), 10.0),
    ],
)
async def test_pauses_sleep_and_updates_of_weights_suspend_the_clock(calls: tuple[str, str], waits_s: float) -> None:
    """Between two calls; afterwards it runs again. Controls: calls that suspend nothing."""
    llm, now = Llm(), [0.0]
    watch = timed(StepCounter(llm), now)
    watch.set_requests(1)
    llm.engine_core.release.set()
    begin, end = (name.split(".") for name in calls)
    await llm.engine_core.call_utility_async(*begin)
    now[0] += 10.0
    assert watch.waited_s == waits_s
    await llm.engine_core.call_utility_async(*end)
    now[0] += 10.0
    assert watch.waited_s == waits_s + 10.0


@pytest.mark.parametrize(
    ("call", "waits_s"), [("collective_rpc.update_weights", 0.0), ("add_lora", 0.0), ("reset_mm_cache", 10.0)]
)
async def test_inside_a_long_call_there_is_no_step_and_a_short_call_excuses_nothing(call: str, waits_s: float) -> None:
    llm, now = Llm(), [0.0]
    watch = timed(StepCounter(llm), now)
    watch.set_requests(1)
    calling = asyncio.create_task(llm.engine_core.call_utility_async(*call.split(".")))
    await asyncio.sleep(0)
    now[0] = 10.0
    assert watch.waited_s == waits_s
    llm.engine_core.release.set()
    await calling
    now[0] = 20.0
    assert watch.waited_s == waits_s + 10.0


def test_a_sleep_that_ends_in_part_goes_on() -> None:
    watch = StepWatch(AwakeClock(lambda: 0.0, max_gap_s=inf))
    suspensions = Suspensions(watch)
    watch.set_requests(1)
    for method, result, is_suspended in (("sleep", None, True), ("wake_up", False, True), ("wake_up", True, False)):
        with suspensions.during(method) as on_result:
            on_result(result)
        assert (watch._since is None) == is_suspended


CORE = f"""
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: None)
child = subprocess.Popen([{sys.executable!r}, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_processes_are_killed_also_when_they_are_stopped() -> None:
    """The engine core and what it has started. Control: SIGTERM, for which both would have to run."""
    core = subprocess.Popen([sys.executable, "-c", CORE], stdout=subprocess.PIPE)
    assert core.stdout is not None
    with core.stdout as output:
        child = psutil.Process(int(output.readline()))
    core.send_signal(signal.SIGSTOP)
    child.send_signal(signal.SIGSTOP)
    core.terminate()
    time.sleep(0.3)
    assert core.poll() is None
    manager = SimpleNamespace(processes=[SimpleNamespace(pid=core.pid)])
    llm: Any = SimpleNamespace(engine_core=SimpleNamespace(resources=SimpleNamespace(engine_manager=manager)))
    kill_processes(llm)
    assert core.wait(10) == -signal.SIGKILL
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
