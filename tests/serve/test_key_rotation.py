"""Transport keys of real processes are rotated under load: 3 frontends, 2 workers, no request fails, nothing is encoded
again, and no process is restarted."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import httpx
import pytest

from semel.lab.bench.ports import free_port
from semel.telemetry import metrics
from tests.conftest import Folder
from tests.serve.balancer import Load, body_of
from tests.serve.served import FLAGS, SEMEL, sum_of, until
from tests.serve.test_draining import picture
from tests.serve.test_rolling_restart import Process
from tests.waiting import until as soon

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.nightly, pytest.mark.timeout(1_800)]

logger = logging.getLogger(__name__)

START_S = 600.0
MOVE_S = 120.0
FRONTENDS, WORKERS, PICTURES = 3, 2, 4


@dataclass
class Fleet:
    """Real processes, each with a folder of keys of its own: as on machines of their own."""

    home: Path
    workers: list[Process] = field(default_factory=list)
    frontends: list[Process] = field(default_factory=list)

    def hand_out(self) -> None:
        """Give every process its files, as they are now."""
        for role, processes in (("frontend", self.frontends), ("worker", self.workers)):
            for number in range(len(processes) or FRONTENDS):
                own = self.home / f"{role}-{number}.keys"
                if not own.exists():
                    shutil.copytree(self.home / "keys" / role, own)
                new = own / ".new"
                shutil.copy2(self.home / "keys" / role / "transport.keys", new)
                new.replace(own / "transport.keys")

    def key(self, *words: str) -> None:
        done = subprocess.run([SEMEL, "key", *words, self.home / "keys"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def total(self, processes: Sequence[Process], name: str, label: str = "") -> float:
        return sum(_sum(one, name, label) for one in processes)

    def work(self) -> dict[str, float]:
        """Items that were processed, that workers hold, that were sent to them, and that they encoded."""
        items = self.total(self.workers, metrics.MM_CACHE_ITEMS.name)
        encoded = self.total(self.workers, metrics.ENCODER_PLANNED.name)
        sent, processed = (
            self.total(self.frontends, one.name) for one in (metrics.FEATURES_SENT, metrics.POOL_PROCESSED)
        )
        return {"processed": processed, "items": items, "sent": sent, "encoded": encoded}

    def have(self, generation: int) -> bool:
        """Whether every link has these keys, as both ends see it."""
        links = self.total(self.frontends, metrics.LINK_KEY_GENERATION.name) == FRONTENDS * WORKERS * generation
        sessions = self.total(self.workers, metrics.FRONTEND_SESSIONS.name, f'generation="{generation}"')
        return links and sessions == self.total(self.workers, metrics.FRONTEND_SESSIONS.name) == FRONTENDS * WORKERS


def _sum(process: Process, name: str, label: str) -> float:
    reply = process.get("/metrics")
    assert reply is not None
    return sum_of("\n".join(line for line in reply.text.splitlines() if label in line), name)


@contextmanager
def fleet_of(model: Path, home: Path, worker: Sequence[str], flags: Sequence[str]) -> Iterator[Fleet]:
    fleet = Fleet(home)
    fleet.key("make")
    fleet.hand_out()
    environment = {"TMPDIR": str(home), "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(WORKERS)]

    def begin(name: str, port: int, *command: str) -> Process:
        words = [str(SEMEL), *command, "--key-dir", str(home / f"{name}.keys"), "--drain-delay-s", "0"]
        made = Process(words, port, home / f"{name}.log", environment)
        made.start()
        stack.callback(made.kill)
        return made

    with ExitStack() as stack:
        for number, address in enumerate(addresses):
            environment["VLLM_CPU_OMP_THREADS_BIND"] = str(number % (os.cpu_count() or 1))
            port = free_port()
            own = ("--listen", address, "--admin-port", str(port), *flags)
            fleet.workers.append(begin(f"worker-{number}", port, *worker, str(model), *own))
        for number in range(FRONTENDS):
            port = free_port()
            own = ("--port", str(port), "--preprocessing-processes", "1", *(f"--worker={one}" for one in addresses))
            fleet.frontends.append(begin(f"frontend-{number}", port, "frontend", str(model), *own))
        for one in (*fleet.workers, *fleet.frontends):
            until(one.is_ready, START_S, every_s=0.25)
        until(lambda: fleet.have(1), START_S, every_s=0.25)
        yield fleet


async def _rotate(fleet: Fleet, tokens: int) -> list[Load]:
    question = {"type": "text", "text": "What is it?"}
    bodies = [
        body_of([picture(seed), question], max_tokens=tokens, **({"stream": True} if seed % 2 else {}))
        for seed in range(PICTURES)
    ]
    async with AsyncClients([one.port for one in fleet.frontends]) as clients:
        loads = [Load(client, bodies) for client in clients]
        tasks = [asyncio.create_task(load.run(PICTURES)) for load in loads]
        try:
            # Every worker has to have every picture: only then is nothing new.
            await _until_calm(fleet, loads)
            before, answered = await asyncio.to_thread(fleet.work), sum(load.answered for load in loads)
            for step, generation in (("rotate", 2), ("retire", 2), ("rotate", 3)):
                await asyncio.to_thread(fleet.key, step)
                fleet.hand_out()
                await asyncio.to_thread(until, lambda: fleet.have(generation), MOVE_S, every_s=0.25)  # noqa: B023
                await _answers(loads, 20)
            after = await asyncio.to_thread(fleet.work)
            logger.info("%d answered while keys were rotated", sum(load.answered for load in loads) - answered)
            logger.info("%s before, %s after", before, after)
            _check_nothing_again(before, after)
        finally:
            for load in loads:
                load.stopping.set()
            await asyncio.gather(*tasks, return_exceptions=True)
    return loads


def _check_nothing_again(before: dict[str, float], after: dict[str, float]) -> None:
    """A worker may get an item for the first time at any moment, because the other was busy; nothing comes again."""
    grown = {name: after[name] - before[name] for name in before}
    assert grown["processed"] == 0
    assert grown["sent"] <= FRONTENDS * grown["items"]
    assert grown["encoded"] <= grown["items"]


class AsyncClients(list[httpx.AsyncClient]):
    """A client for each frontend."""

    def __init__(self, ports: Sequence[int]) -> None:
        super().__init__(httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120) for port in ports)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self:
            await client.aclose()


async def _answers(loads: Sequence[Load], more: int) -> None:
    goals = [load.answered + more for load in loads]

    def is_so() -> bool:
        return all(load.answered >= goal for load, goal in zip(loads, goals, strict=True)) or _failures(loads) != []

    await soon(is_so, within_s=MOVE_S)


async def _until_calm(fleet: Fleet, loads: Sequence[Load]) -> None:
    """Wait until requests are answered and nothing is processed, sent or encoded for them."""
    for _ in range(20):
        before = await asyncio.to_thread(fleet.work)
        await _answers(loads, 20)
        if await asyncio.to_thread(fleet.work) == before:
            return
    raise AssertionError("there is always something new")


def _failures(loads: Sequence[Load]) -> list[str]:
    return [failure for load in loads for failure in load.failures]


def _check(run: Callable[[], list[Load]], fleet: Fleet) -> None:
    running = [one.process.pid for one in (*fleet.workers, *fleet.frontends)]
    loads = run()
    assert _failures(loads) == []
    assert [one.process.pid for one in (*fleet.workers, *fleet.frontends) if one.process.poll() is None] == running


def test_keys_of_processes_are_rotated_under_load(tiny: Folder, tmp_path: Path) -> None:
    with fleet_of(tiny("qwen2-vl"), tmp_path, ("testing", "worker"), ("--rate", "40")) as fleet:
        _check(lambda: asyncio.run(asyncio.wait_for(_rotate(fleet, 10), 900)), fleet)


@pytest.mark.engine
def test_keys_of_real_engines_are_rotated_under_load(tiny: Folder, tmp_path_factory: pytest.TempPathFactory) -> None:
    home = tmp_path_factory.mktemp("keys")  # short: the names of sockets in it have at most 107 characters
    with fleet_of(tiny("qwen2-vl"), home, ("worker",), FLAGS) as fleet:
        _check(lambda: asyncio.run(asyncio.wait_for(_rotate(fleet, 8), 1_500)), fleet)
