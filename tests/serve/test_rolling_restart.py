"""Every process of a fleet is restarted under load behind a real Envoy, and no request fails."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from semel.lab.bench.ports import free_port
from semel.settings.secrets import create_key
from tests.conftest import Folder
from tests.serve.balancer import Balancer, Load, balancing, body_of, large_bodies
from tests.serve.served import FLAGS, SEMEL, sum_of, until
from tests.waiting import until as soon

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.nightly, pytest.mark.timeout(1_200)]

logger = logging.getLogger(__name__)

START_S = 600.0
POLL_S = 0.25
STOP_S = 90.0
FRONTENDS, WORKERS = 3, 2


@dataclass
class Process:
    """A command of semel that can be started again in its place."""

    command: list[str]
    port: int
    """Of a frontend its API, of a worker nothing."""

    log: Path
    environment: dict[str, str]
    process: subprocess.Popen[bytes] = field(init=False)

    def stop(self) -> None:
        self.process.terminate()
        assert self.process.wait(STOP_S) == 0, self.log.read_text()[-3_000:]

    def start(self, *flags: str) -> None:
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [*self.command, *flags],
                stdout=output,
                stderr=output,
                process_group=0,
                env=os.environ | self.environment,
            )

    def get(self, path: str) -> httpx.Response | None:
        assert self.process.poll() is None, self.log.read_text()[-3_000:]
        try:
            # Certificates are for nothing here, and loading them is what a request would spend most of its time with.
            return httpx.get(f"http://127.0.0.1:{self.port}{path}", timeout=10, verify=False)
        except httpx.TransportError:
            return None

    def is_ready(self) -> bool:
        reply = self.get("/ready")
        return reply is not None and reply.status_code == 200

    def is_connected_to(self, count: int) -> bool:
        reply = self.get("/metrics")
        return reply is not None and sum_of(reply.text, "semel_worker_connected") == count

    def kill(self) -> None:
        if self.process.poll() is None:
            family = [parent := psutil.Process(self.process.pid), *parent.children(recursive=True)]
            for one in family:
                one.kill()
        self.process.wait(20)


@dataclass
class Fleet:
    """Workers, frontends, and the balancer before them."""

    workers: list[Process] = field(default_factory=list)
    frontends: list[Process] = field(default_factory=list)

    def until_whole(self) -> None:
        for frontend in self.frontends:
            until(frontend.is_ready, START_S, every_s=POLL_S)
            connected = partial(frontend.is_connected_to, WORKERS)
            until(connected, START_S, every_s=POLL_S)


@contextmanager
def fleet_of(model: Path, home: Path, worker: Sequence[str], flags: Sequence[str]) -> Iterator[tuple[Fleet, Balancer]]:
    """All of it, up; its processes are killed at the end, if they are still there."""
    create_key(home / "key")
    fleet = Fleet()
    environment = {"TMPDIR": str(home), "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(WORKERS)]
    (home / "workers").write_text("\n".join(addresses))

    def begin(name: str, port: int, *command: str) -> Process:
        arguments = [str(SEMEL), *command, "--fleet-key-file", str(home / "key")]
        made = Process(arguments, port, home / f"{name}.log", environment)
        made.start()
        stack.callback(made.kill)
        return made

    with ExitStack() as stack:
        for number, address in enumerate(addresses):
            core = {"VLLM_CPU_OMP_THREADS_BIND": str(number % (os.cpu_count() or 1))}
            made = begin(f"worker-{number}", 0, *worker, str(model), "--listen", address, *flags)
            made.environment = environment | core
            fleet.workers.append(made)
        for number in range(FRONTENDS):
            port = free_port()
            flags_ = ("--port", str(port), "--preprocessing-processes", "1", "--worker-file", str(home / "workers"))
            fleet.frontends.append(begin(f"frontend-{number}", port, "frontend", str(model), *flags_))
        fleet.until_whole()
        yield fleet, stack.enter_context(balancing(home, [one.port for one in fleet.frontends]))


async def _restart_all(fleet: Fleet) -> None:
    """One frontend and one worker at a time; the last frontend comes back without a drain delay, for the control."""
    for number, frontend in enumerate(fleet.frontends):
        together = [frontend, *fleet.workers[number : number + 1]]
        await asyncio.gather(*(asyncio.to_thread(one.stop) for one in together))
        for one in together:
            one.start(*(("--drain-delay-s", "0") if one is fleet.frontends[-1] else ()))
        await asyncio.to_thread(fleet.until_whole)


async def _roll(fleet: Fleet, balancer: Balancer, *, tokens: int, clients: int, pause_s: float) -> tuple[Load, Load]:
    large, small = large_bodies(4, tokens), [body_of("Count.", max_tokens=2)]
    async with balancer.client() as client:
        loads = Load(client, large, pause_s), Load(client, small, 0.25)
        tasks = [asyncio.create_task(load.run(clients)) for load in loads]
        await _restart_all(fleet)
        for load in loads:
            load.stopping.set()
        await asyncio.gather(*tasks)
    return loads


async def _stop_at_once(fleet: Fleet, balancer: Balancer) -> Load:
    """Stop a frontend that refuses requests at once, while it has a long answer to give."""
    stopped = fleet.frontends[-1]
    async with balancer.client() as client, httpx.AsyncClient(timeout=60) as direct:
        load = Load(client, [body_of("Count.", max_tokens=1)])
        asking = asyncio.create_task(load.run(6))
        body = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 4_000, "stream": True}
        async with direct.stream("POST", f"http://127.0.0.1:{stopped.port}/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200
            before = load.answered
            await soon(lambda: load.answered >= before + 30, within_s=60)
            stopped.process.terminate()
            await soon(lambda: bool(load.failures) or stopped.process.poll() is not None, within_s=60)
        load.stopping.set()
        await asking
    return load


def _check(loads: tuple[Load, Load], at_least: int) -> None:
    for name, load in zip(("4 MB", "small"), loads, strict=True):
        logger.info("%s: %d answered, %d failed", name, load.answered, len(load.failures))
        assert not load.failures, load.failures[:5]
        assert load.answered >= at_least


def test_a_rolling_restart_under_load_fails_no_request(tiny: Folder, tmp_path: Path) -> None:
    """Control: a frontend that refuses requests in the moment of its SIGTERM fails some, with the same balancer."""
    worker, flags = ("testing", "worker"), ("--rate", "40")
    with fleet_of(tiny("qwen2-vl"), tmp_path, worker, flags) as (fleet, balancer):
        loads = asyncio.run(asyncio.wait_for(_roll(fleet, balancer, tokens=20, clients=2, pause_s=0.5), 800))
        _check(loads, 20)
        control = asyncio.run(asyncio.wait_for(_stop_at_once(fleet, balancer), 120))
        assert any("503" in failure for failure in control.failures), control.outcomes


@pytest.mark.engine
@pytest.mark.timeout(1_800)
def test_a_rolling_restart_of_real_engines_under_load_fails_no_request(tiny: Folder, tmp_path: Path) -> None:
    with fleet_of(tiny("qwen2-vl"), tmp_path, ("worker",), FLAGS) as (fleet, balancer):
        _check(asyncio.run(asyncio.wait_for(_roll(fleet, balancer, tokens=8, clients=2, pause_s=0.2), 1_500)), 20)
