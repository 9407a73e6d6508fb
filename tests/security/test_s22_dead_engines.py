"""S22: a request that kills engines ends at most two of them, once, and takes nobody else's answer with it.

So does one on which they hang. Workers are processes, and all goes over real sockets. Who gets a strike stands in
tests/fleet/test_quarantine.py, when an engine hangs in tests/engine/test_progress.py, what its worker does then in
tests/worker/test_progress.py. `scripts/faults` stops a vLLM.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import DEVNULL, Process
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import ClassVar
from unittest.mock import patch

import pytest

from semel.core import Digest, Feature, Submission
from semel.errors import NotReady, RequestQuarantined, ServiceError, WorkerLost
from semel.fleet.fleet import Fleet
from semel.fleet.membership import Membership
from semel.fleet.quarantine import EngineRun, Quarantine
from semel.fleet.retry_policy import FleetHealth, RetryPolicy
from semel.fleet.stream import BufferedAnswer, StreamedAnswer
from semel.telemetry import Meter
from tests.fleet.test_membership import connect
from tests.waiting import until
from tests.wire.examples import digest_of
from tests.worker.pairing import expected, feature, prompt
from tools.fleet.failing import Trial, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

KILLER = 7
"""The number of the item whose request kills."""

TENANT = "\0acme\n"


@dataclass
class Three:
    """A fleet of three processes, which nobody replaces."""

    fleet: Fleet
    processes: list[Process]
    numbers: count[int] = field(default_factory=count)

    async def ask(
        self,
        number: int,
        fault: str = "",
        kind: type[StreamedAnswer] = BufferedAnswer,
        tenant: str = TENANT,
    ) -> tuple[int, ...]:
        async def make(_: Digest) -> Feature:
            return feature(number)

        worker = self.fleet.choose([digest_of(number)])
        sampling = {"fail": fault} if fault else {}
        submission = Submission(f"r{next(self.numbers)}", prompt([number]), {}, sampling, tenant)
        async with asyncio.timeout(20):
            stream = await self.fleet.submit(worker, submission, make, kind)
            try:
                return tuple([token async for output in stream for token in output.token_ids])
            finally:
                await stream.close()

    @property
    def dead(self) -> int:
        return sum(process.returncode is not None for process in self.processes)

    async def until_dead(self, number: int) -> None:
        await until(lambda: self.dead == number and len(self.fleet.serving) == 3 - number)


@asynccontextmanager
async def three_workers(
    folder: Path, *, pause_s: float = 0.02, first_fault: str = "", progress_s: float = 0.0
) -> AsyncIterator[Three]:
    """The first one serves before the others start: it is the first to be chosen."""
    fleet = Fleet(health=FleetHealth(meter=Meter()))
    async with AsyncExitStack() as stack:
        members = Membership(fleet, connect)
        stack.push_async_callback(members.close)
        addresses = [f"ipc://{folder}/{name}/w.sock" for name in "abc"]
        processes: list[Process] = []

        async def start(address: str, fault: str = "") -> None:
            command = (
                sys.executable,
                "-m",
                "tests.frontend.echo_process",
                address,
                str(pause_s),
                fault,
                str(progress_s),
            )
            process = await asyncio.create_subprocess_exec(*command, stderr=DEVNULL)
            stack.push_async_callback(ended, process)
            processes.append(process)

        async def no_lists() -> AsyncIterator[list[str]]:
            await asyncio.Event().wait()
            yield []

        for name, address in zip("abc", addresses, strict=True):
            (folder / name).mkdir(mode=0o700, parents=True)
            await members.join(address)
        running = asyncio.create_task(members.run(no_lists()))
        stack.callback(running.cancel)
        await start(addresses[0], first_fault)
        await until(lambda: len(fleet.serving) == 1, within_s=60.0)
        for address in addresses[1:]:
            await start(address)
        await until(lambda: len(fleet.serving) == 3, within_s=60.0)
        yield Three(fleet, processes)


async def ended(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


@pytest.mark.parametrize("fault", ["death", "late_death"])
@pytest.mark.parametrize("kind", [StreamedAnswer, BufferedAnswer])
async def test_of_three_workers_a_request_that_kills_engines_ends_at_most_two_and_once(
    tmp_path: Path, kind: type[StreamedAnswer], fault: str
) -> None:
    """However its client repeats it. Others are answered, and so is the same content of another tenant."""
    async with three_workers(tmp_path) as three:
        for _ in range(4):
            with pytest.raises(ServiceError) as error:
                await three.ask(KILLER, fault, kind)
            assert error.value.status == 503
        await three.until_dead(2)
        with pytest.raises(RequestQuarantined):
            await three.ask(KILLER, fault, kind)
        with pytest.raises(RequestQuarantined):
            await three.ask(KILLER)
        assert await three.ask(1) == expected([1])
        assert await three.ask(KILLER, tenant="\0other\n") == expected([KILLER])
        assert three.dead == 2


async def test_control_without_strikes_it_ends_all_three(tmp_path: Path) -> None:
    with patch.object(Quarantine, "_strike", lambda *_: None):
        async with three_workers(tmp_path) as three:
            for _ in range(2):
                with pytest.raises((WorkerLost, NotReady)):
                    await three.ask(KILLER, "death")
            await three.until_dead(3)


async def test_who_was_under_way_with_it_is_answered_elsewhere_and_not_refused(tmp_path: Path) -> None:
    """Twelve requests beside it, at all workers. It has the second engine to itself, and gets the blame alone."""
    async with three_workers(tmp_path, pause_s=0.15) as three:
        others = [asyncio.create_task(three.ask(number)) for number in range(20, 32)]
        await asyncio.sleep(0.05)
        with pytest.raises(ServiceError):
            await three.ask(KILLER, "death")
        answers = await asyncio.gather(*others, return_exceptions=True)
        await three.until_dead(2)
        lost = [answer for answer in answers if isinstance(answer, BaseException)]
        assert all(isinstance(one, WorkerLost) for one in lost), "under way at both engines that died"
        assert len(lost) <= 2
        for number in range(20, 32):
            assert await three.ask(number) == expected([number]), "nobody else is refused"
        assert three.dead == 2


def always_the_first(fleet: Fleet) -> AbstractContextManager[object]:
    """Every request goes to the worker that connected first, of those that may be chosen."""

    def choose(_: object, among: int, *__: object) -> int:
        numbers = [fleet._numbers[worker] for worker in fleet.serving]
        return next(number for number in numbers if among >> number & 1)

    return patch("semel.fleet.balance.Balance.choose", choose)


async def test_what_an_engine_that_hangs_had_not_streamed_is_answered_elsewhere(tmp_path: Path) -> None:
    """Control: without a time for its progress they wait for ever."""
    for progress_s, is_answered in ((1.0, True), (0.0, False)):
        folder = tmp_path / str(is_answered)
        async with three_workers(folder, first_fault="hang", progress_s=progress_s) as three:
            with always_the_first(three.fleet):
                asking = [asyncio.create_task(three.ask(number)) for number in range(50, 54)]
                done, waiting = await asyncio.wait(asking, timeout=10.0 if is_answered else 4.0)
            assert bool(done) is is_answered
            assert not waiting or not is_answered
            assert [task.result() for task in asking if task in done] == [expected([n]) for n in range(50, 54) if done]
            await three.until_dead(int(is_answered))
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_request_on_which_engines_hang_ends_at_most_two(tmp_path: Path) -> None:
    async with three_workers(tmp_path, progress_s=1.0) as three:
        for _ in range(3):
            with pytest.raises(ServiceError):
                await three.ask(KILLER, "hang")
        await three.until_dead(2)
        with pytest.raises(RequestQuarantined):
            await three.ask(KILLER, "hang")
        assert await three.ask(1) == expected([1])
        assert any("engine_hung" in worker.reason for worker in three.fleet.workers)


class Counting(RetryPolicy):
    """Counts the requests that are at their second engine and have no output yet, by worker."""

    at_once: ClassVar[Counter[str]] = Counter()
    most: ClassVar[int] = 0
    second = ""

    def begin(self, engine: EngineRun) -> None:
        super().begin(engine)
        if self._is_second:
            self.second = engine.worker
            Counting.at_once[self.second] += 1
            Counting.most = max(Counting.most, Counting.at_once[self.second])

    def on_output(self) -> None:
        super().on_output()
        Counting.at_once[self.second] -= bool(self.second)


class AllAtOnce(Counting):
    """Has no such rule."""

    needs_idle_worker = False


@pytest.mark.parametrize(("kind", "most"), [(Counting, 1), (AllAtOnce, 5)], ids=["shipped", "control"])
async def test_suspects_go_to_an_engine_one_at_a_time(tmp_path: Path, kind: type[Counting], most: int) -> None:
    Counting.at_once, Counting.most = Counter(), 0
    async with three_workers(tmp_path, pause_s=0.1, first_fault="hang") as three:  # it answers nobody before it ends
        with patch("semel.fleet.fleet.RetryPolicy", kind), always_the_first(three.fleet):
            asking = [asyncio.create_task(three.ask(number)) for number in range(40, 46)]
            chosen = three.fleet.serving[0]  # the first that connected, whichever that is
            await until(lambda: len(chosen._streams) == 6)
            three.processes[three.fleet.workers.index(chosen)].kill()
            assert await asyncio.gather(*asking) == [expected([number]) for number in range(40, 46)]
    assert Counting.most == 1 if most == 1 else Counting.most >= most


# A worker that fails looks idle, and draws requests. `scripts/failing-worker` shows the same for 60 s.


async def test_failures_before_the_first_token_reach_at_most_one_client_in_a_hundred() -> None:
    """Control: as it was before, a third of all clients and more: the worker that fails looked idle."""
    seen = await run(Trial(3, 20.0, "first_token", "shipped", 12.0))
    before = await run(Trial(3, 20.0, "first_token", "before", 6.0))
    assert seen.errors <= 0.01 * seen.requests
    assert seen.ejections >= 1
    assert before.errors >= 0.2 * before.requests


async def test_failures_of_streams_that_have_begun_reach_at_most_five_clients() -> None:
    """Nobody can take back what was sent, so only ejection helps. Control: without anything, far more of them."""
    seen = await run(Trial(3, 20.0, "second_token", "shipped", 12.0))
    before = await run(Trial(3, 20.0, "second_token", "before", 6.0))
    assert seen.errors <= 5
    assert before.errors >= 0.2 * before.requests
