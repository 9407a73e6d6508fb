"""How a frontend ends, as a real Envoy with our configuration sees it. Server and routes are those of a frontend.

All in one process and in seconds. `tests/serve/test_rolling_restart.py` does the same with real processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from semel.compose.draining import drain, leave
from semel.lab.bench.ports import free_port
from semel.render import Pipeline
from semel.shutdown import ShutdownSignal
from semel.web.server import HttpServer
from tests.frontend.rig import Rig, rig, stalled_first_tokens
from tests.render.drawn import Drawing
from tests.serve.balancer import CHAT, Balancer, Load, balancing, body_of
from tests.waiting import until

pytestmark = pytest.mark.slow

DELAY_S = 4.0
"""Over what Envoy takes to notice: it asks every second."""


@dataclass
class Served:
    """A frontend at a port, which can be restarted there."""

    rig: Rig
    port: int
    server: HttpServer = field(init=False)
    running: asyncio.Task[None] = field(init=False)

    def start(self) -> None:
        self.rig.service._leaving = ""
        self.rig.service.limiter.close("")
        self.server = HttpServer(self.rig.app, "127.0.0.1", self.port)
        self.running = asyncio.create_task(self.server.serve())

    async def end(self, delay_s: float) -> None:
        """As `run_frontend` does it on SIGTERM."""
        stopping = ShutdownSignal()
        await leave(self.rig.service, self.server, stopping, delay_s)
        await drain(self.rig.service, self.server, stopping, 5.0)
        self.server.stop(at_once=bool(self.rig.service.limiter.requests))
        await self.running


@asynccontextmanager
async def frontends(home: Path, pipeline: Pipeline) -> AsyncIterator[list[Served]]:
    async with AsyncExitStack() as stack:
        made = []
        for number in range(3):
            (folder := home / str(number)).mkdir(mode=0o700)
            made.append(Served(await stack.enter_async_context(rig(folder, pipeline)), free_port()))
            made[-1].start()
        yield made
        for one in made:
            one.server.stop(at_once=True)
        await asyncio.gather(*(one.running for one in made), return_exceptions=True)


@asynccontextmanager
async def balanced(home: Path, served: Sequence[Served]) -> AsyncIterator[Balancer]:
    """Envoy before them; what waits for it does so beside the event loop, which answers it."""
    manager = balancing(home, [one.port for one in served])
    balancer = await asyncio.to_thread(manager.__enter__)
    try:
        yield balancer
    finally:
        await asyncio.to_thread(manager.__exit__, None, None, None)


async def _roll(served: Sequence[Served], balancer: Balancer, delay_s: float) -> Load:
    """Restart one after another under load; one long answer keeps each from ending at once."""
    async with balancer.client() as client:
        load = Load(client, [body_of("Count.", max_tokens=4)])
        asking = asyncio.create_task(load.run(8))
        for one in served:
            before = load.answered
            await until(lambda: load.answered > before + 50)  # noqa: B023 it is called before the next one
            with stalled_first_tokens():
                body = {"messages": [{"role": "user", "content": "?"}]}
                waiting = asyncio.create_task(one.rig.post(CHAT, body))
                await until(lambda: one.rig.service.limiter.requests > 0)  # noqa: B023
            await one.end(delay_s)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            one.start()
            await asyncio.sleep(2)  # Envoy asks again
        load.stopping.set()
        await asking
    return load


@pytest.mark.parametrize("delay_s", [DELAY_S, 0.0])
async def test_requests_fail_only_without_a_drain_delay(delay_s: float, tmp_path: Path, drawing: Drawing) -> None:
    """Control: without one a frontend refuses requests until Envoy has asked again whether it is ready."""
    async with frontends(tmp_path, drawing.pipeline) as served, balanced(tmp_path, served) as balancer:
        load = await _roll(served, balancer, delay_s)
    assert load.answered > 150
    assert bool(load.failures) == (not delay_s), load.failures[:5]
    assert any("not_ready" in failure for failure in load.failures) == (not delay_s)
