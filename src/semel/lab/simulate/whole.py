"""The level `whole`: the shipped code of frontends and workers on a virtual loop, with faults, held to its invariants.

A run is a function of its seed: the same figures to the byte, in every process. Up to about 32 frontends and 32 workers
are simulated faster than they would run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from semel.errors import EngineFailed, NotReady, RequestQuarantined, WorkerLost
from semel.lab.simulate import clock
from semel.lab.simulate.costs import MODELLED, Costs
from semel.lab.simulate.engine import Prompts
from semel.lab.simulate.faults import Blip, Broken, Crash, Drain, Fault, FrontendCrash, Join, Partition, Slow
from semel.lab.simulate.figures import Figures
from semel.lab.simulate.invariants import InvariantBroken, check_invariants
from semel.lab.simulate.network import Network
from semel.lab.simulate.processes import FleetSize, FrontendProcess, Host, WorkerProcess
from semel.lab.simulate.repeats import causes_of
from semel.lab.simulate.served_engine import ModelledEngine
from semel.lab.simulate.workload import Ask, Workload
from semel.telemetry import Meter, metrics
from semel.telemetry.meter import Metric

__all__ = ["Plan", "World", "run"]

_SAMPLE_S: Final = 1.0
_SETTLE_S: Final = 15.0
"""Until links are open again after the last fault, and all updates have come."""

_LIMIT_S: Final = 900.0
"""How long an answer may take. Nobody waits so long: the request counts as lost."""

_START_S: Final = 1.0
_DRAIN_S: Final = 5.0
_LEAVE_DECADES: Final = (-3.0, 0.5)
"""Clients leave after a millisecond to three seconds: while a request is parsed, prepared, sent or answered."""

_MAX_REASONS: Final = 8
_EXPLAINED: Final = (EngineFailed, NotReady, RequestQuarantined, WorkerLost)
"""What clients may hear because of a fault."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a simulation."""

    workload: Workload
    size: FleetSize = field(default_factory=FleetSize)
    costs: Costs = MODELLED
    faults: Sequence[Fault] = ()
    seed: int = 0
    clients: int | None = None
    """How many requests are asked at a time, whatever the times of the workload; None for its times."""

    frontends: Sequence[int] = ()
    """The frontend that each request goes to; without them any."""

    leaving: float = 0.0
    """The share of clients that leave before their answer is complete."""


def run(plan: Plan) -> Figures:
    """Simulate a plan. Raises `InvariantBroken` with the seed if it does not end as it must."""
    with _without_logs():
        try:
            return clock.run(_run(plan))
        except (InvariantBroken, clock.Stuck) as error:
            raise InvariantBroken(f"seed {plan.seed}: {error}") from error


@contextmanager
def _without_logs() -> Iterator[None]:
    logger = logging.getLogger("semel")
    before, logger.disabled = logger.level, False
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


async def _run(plan: Plan) -> Figures:
    """Everything from the first start to the invariants."""
    world = World(plan, Host(plan.size, plan.costs, plan.seed, Network(plan.costs)))
    await world.start()
    await world.play()
    await asyncio.sleep(_SETTLE_S)
    figures = world.collect()
    world.check()
    return figures


class World:
    """All processes, and what befalls them. On a virtual loop with a network, or with real sockets on a real one."""

    def __init__(self, plan: Plan, host: Host) -> None:
        self._plan = plan
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._frontends = [FrontendProcess(host, f"frontend-{number}") for number in range(plan.size.frontends)]
        self._workers = [WorkerProcess(host, self._address(number)) for number in range(plan.size.workers)]
        self._roster = [worker.address for worker in self._workers]
        self._figures = Figures()
        self._prompts = Prompts()
        self._wrong: list[str] = []

    async def start(self) -> None:
        """Start all processes, and give them a moment to find each other."""
        for worker in self._workers:
            await worker.start()
        for frontend in self._frontends:
            await frontend.start(self._roster)
        await asyncio.sleep(_START_S)

    async def play(self) -> None:
        """All requests and all faults."""
        sampling = asyncio.create_task(self._sample())
        await _all([self._drive(), *(self._play(fault) for fault in self._plan.faults)])
        sampling.cancel()

    async def close(self) -> None:
        """End all processes."""
        for frontend in self._frontends:
            await frontend.close()
        for worker in self._workers:
            await worker.close()

    # Requests.

    async def _drive(self) -> None:
        asks = enumerate(self._plan.workload.asks(self._host.random("asks")))
        began, clients = self._loop.time(), self._plan.clients
        room = asyncio.Semaphore(clients or 1)
        async with asyncio.TaskGroup() as group:
            for number, ask in asks:
                if clients is None:
                    await asyncio.sleep(began + ask.at_s - self._loop.time())
                else:
                    await room.acquire()
                group.create_task(self._ask(number, ask)).add_done_callback(lambda _: room.release())

    async def _ask(self, number: int, ask: Ask) -> None:
        """Ask any frontend that is up, as a client behind a load balancer does."""
        rng = self._host.random("client", number)
        figures, began = self._figures, self._loop.time()
        figures.ask(ask)
        up = [frontend for frontend in self._frontends if frontend.is_up]
        if not up:
            figures.refused += 1
            return
        tokens: list[int] = []
        first_s: list[float] = []

        def on_token(token: int) -> None:
            if not tokens:
                first_s.append(self._loop.time() - began)
            tokens.append(token)

        frontend = self._frontends[self._plan.frontends[number]] if self._plan.frontends else rng.choice(up)
        places = [one.offset for one in self._prompts.places(ask)]
        asking = asyncio.create_task(frontend.ask(ask, f"request-{number}", places, on_token))
        if rng.random() < self._plan.leaving:
            self._loop.call_later(10.0 ** rng.uniform(*_LEAVE_DECADES), asking.cancel)
        done, _ = await asyncio.wait({asking}, timeout=_LIMIT_S)
        if not done:
            self._wrong.append(f"request {number} has no answer after {_LIMIT_S:g} s")
            asking.cancel()
            return
        self._tally(number, ask, asking, tokens)
        if not asking.cancelled() and asking.exception() is None:
            figures.first_token_s.extend(first_s)
            figures.whole_s.append(self._loop.time() - began)

    def _tally(self, number: int, ask: Ask, asking: asyncio.Task[None], tokens: Sequence[int]) -> None:
        """Count what became of a request, and note what is wrong with it."""
        figures = self._figures
        if list(tokens) != list(range(1, len(tokens) + 1)):
            self._wrong.append(f"request {number} was answered with tokens {tokens[:20]}")
        if asking.cancelled():
            figures.extra["left"] = figures.extra.get("left", 0) + 1
        elif (error := asking.exception()) is not None:
            figures.refused += 1
            if not isinstance(error, _EXPLAINED):
                self._wrong.append(f"request {number} was refused for no fault's sake: {error!r}")
        else:
            figures.answered += 1
            if len(tokens) != ask.answer_tokens:
                self._wrong.append(f"request {number} has {len(tokens)} tokens instead of {ask.answer_tokens}")

    # Faults.

    async def _play(self, fault: Fault) -> None:
        network = self._host.network
        assert network is not None, "only simulated fleets have faults"
        await asyncio.sleep(fault.at_s)
        match fault:
            case Crash() | Drain():
                await self._restart(self._workers[fault.worker], fault)
            case FrontendCrash():
                await self._restart_frontend(self._frontends[fault.frontend], fault.for_s)
            case Join():
                await self._join()
            case Partition():
                names = [self._frontends[number].name for number in fault.frontends]
                ends = names, [self._workers[fault.worker].address]
                network.cut(*ends)
                await asyncio.sleep(fault.for_s)
                network.heal(*ends)
            case Slow() | Broken():
                await self._impair(self._workers[fault.worker].engine, fault)
            case Blip():
                names = [frontend.name for frontend in self._frontends]
                for connection in network.between(names, [self._workers[fault.worker].address]):
                    network.sever(connection)

    async def _restart(self, worker: WorkerProcess, fault: Crash | Drain) -> None:
        if worker.is_up and not worker.is_ending:
            worker.is_ending = True
            await (worker.kill() if isinstance(fault, Crash) else worker.drain(_DRAIN_S))
            await asyncio.sleep(fault.for_s)
            await worker.start()
            worker.is_ending = False

    async def _restart_frontend(self, frontend: FrontendProcess, for_s: float) -> None:
        if frontend.is_up:
            await frontend.kill()
            await asyncio.sleep(for_s)
            await frontend.start(self._roster)

    async def _impair(self, engine: ModelledEngine, fault: Slow | Broken) -> None:
        """Another engine in its place is not impaired."""
        if isinstance(fault, Slow):
            engine.model.slowness *= fault.factor
            await asyncio.sleep(fault.for_s)
            engine.model.slowness /= fault.factor
        else:
            engine.is_broken = True
            await asyncio.sleep(fault.for_s)
            engine.is_broken = False

    async def _join(self) -> None:
        rng = self._host.random("join")
        self._workers.append(worker := WorkerProcess(self._host, self._address(len(self._workers))))
        await worker.start()
        self._roster.append(worker.address)
        for frontend in self._frontends:
            await asyncio.sleep(rng.uniform(0.0, 0.5))
            if frontend.is_up:
                frontend.follow(self._roster)

    # Figures.

    async def _sample(self) -> None:
        while True:
            self._figures.loads.extend(float(worker.engine.model.jobs) for worker in self._workers if worker.is_up)
            await asyncio.sleep(_SAMPLE_S)

    def collect(self) -> Figures:
        """Return the figures of all processes."""
        figures, network = self._figures, self._host.network
        for worker in self._workers:
            figures.by_worker[worker.address] = worker.submissions + worker.engine.submissions
            for model in worker.models:
                figures.encodes += model.encodes
                figures.encoder_hits += model.encoder_hits
                figures.prefix_hits += model.prefix_hits
        for frontend in self._frontends:
            figures.preprocessed += len(frontend.preprocessings)
            for meter in frontend.meters:
                figures.failed_over += round(_total(meter, metrics.FAILOVERS))
                figures.features_sent += round(_total(meter, metrics.FEATURES_SENT))
                figures.feature_bytes += round(_total(meter, metrics.FEATURE_BYTES_SENT))
        made = (one for frontend in self._frontends for one in frontend.preprocessings)
        figures.extra |= {f"preprocessed again, {cause}": count for cause, count in causes_of(made).items()}
        if network is not None:
            figures.to_workers.update(network.flows["to_workers"])
            figures.to_frontends.update(network.flows["to_frontends"])
        return figures

    def check(self) -> None:
        """Raise `InvariantBroken` if it did not end as it must."""
        network, has_faults = self._host.network, bool(self._plan.faults)
        assert network is not None, "only simulated fleets are checked"
        found = [*self._wrong, *check_invariants(self._frontends, self._workers, network, has_faults=has_faults)]
        if not has_faults and self._figures.refused:
            found.append(f"{self._figures.refused} requests were refused, and no fault")
        if found:
            raise InvariantBroken("; ".join(found[:_MAX_REASONS]))

    def _address(self, number: int) -> str:
        return f"{self._host.folder}worker-{number}"


async def _all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for one in work:
            group.create_task(one)


def _total(meter: Meter, metric: Metric) -> float:
    families = meter.registry.collect()
    return sum(one.value for family in families for one in family.samples if one.name == metric.name)
