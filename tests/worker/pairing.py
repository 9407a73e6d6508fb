"""A worker with an echo engine, and frontends linked to it over real sockets, all in one process."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from semel.cache import Borrower, SharedCache
from semel.core import Digest, Feature, Item, Placeholder, Prompt, Submission, Timeline
from semel.fairness.turns import EngineWindow
from semel.fleet.stream import RemoteStream
from semel.fleet.worker import RemoteWorker
from semel.lab.testing.engine import EchoEngine, echo
from semel.telemetry import CacheLookups, Meter
from semel.wire.limits import Limits
from semel.wire.zmq import Backoff, FrontendLink, WorkerListener, memory_path
from semel.worker.turns import EngineTurns
from semel.worker.worker import Worker
from tests.waiting import until
from tests.wire.examples import CONTRACT, KEY, LAYOUT, digest_of, feature_of_rows
from tests.worker.adapting import AdaptingEngine

ITEM_BYTES = feature_of_rows(100).nbytes
REQUEST_IDS = itertools.count()


def feature(number: int) -> Feature:
    return feature_of_rows(100, seed=number)


def prompt(numbers: Sequence[int]) -> Prompt:
    """One image after another, each behind a token."""
    token_ids: list[int] = []
    places: list[Placeholder] = []
    for _ in numbers:
        token_ids.append(1)
        places.append(Placeholder(len(token_ids), len(LAYOUT), LAYOUT.mask))
        token_ids += LAYOUT.token_ids
    items = tuple(Item("image", digest_of(number)) for number in numbers)
    return Prompt(token_ids, Timeline.decoder(places), items)


def expected(numbers: Sequence[int]) -> tuple[int, ...]:
    return echo(prompt(numbers), {digest_of(number): feature(number) for number in numbers})


@dataclass
class Frontend:
    """A frontend's side of one worker; it makes features of numbers, and counts how often."""

    worker: RemoteWorker
    meter: Meter
    lookups: CacheLookups
    memory: SharedCache | None = None
    made: list[int] = field(default_factory=list)
    forgotten: int = 0

    async def make(self, digest: Digest) -> Feature:
        number = int.from_bytes(digest, "big")
        self.made.append(number)
        await asyncio.sleep(0)
        made = feature(number)
        return made if self.memory is None else self.memory.put(digest, made)

    async def submit(self, *numbers: int, of_client: bool = False, **sampling: object) -> RemoteStream:
        asked = prompt(numbers)
        sent = frozenset(item.digest for item in asked.items) if of_client else frozenset[Digest]()
        submission = Submission(f"r{next(REQUEST_IDS)}", asked, {}, sampling, client_features=sent)
        return await self.worker.submit(submission, self.make)

    async def ask(self, *numbers: int, of_client: bool = False, **sampling: object) -> tuple[int, ...]:
        """The tokens of an answer."""
        async with asyncio.timeout(20):
            stream = await self.submit(*numbers, of_client=of_client, **sampling)
            try:
                return tuple([token async for output in stream for token in output.token_ids])
            finally:
                await stream.close()

    def metric(self, name: str) -> float:
        return sum(
            sample.value for family in self.meter.registry.collect() for sample in family.samples if sample.name == name
        )


@dataclass
class Rig:
    """A worker and its frontends."""

    engine: EchoEngine
    worker: Worker
    listener: WorkerListener
    frontends: list[Frontend]

    async def knows(self, frontend: Frontend, *numbers: int) -> None:
        """Wait until a frontend has heard that the worker holds items."""
        await until(lambda: all(frontend.worker.holding(digest_of(number)) for number in numbers))


@asynccontextmanager
async def rig(
    folder: Path,
    *,
    frontends: int = 1,
    items: int = 4,
    shared_items: int | None = None,
    pause_s: float = 0.0,
    limits: Limits | None = None,
    engine: EchoEngine | None = None,
    window: EngineWindow | None = None,
    progress_s: float = 0.0,
) -> AsyncIterator[Rig]:
    """A worker whose engine holds a few items. With `shared_items`, frontends lend memory for so many."""
    address = f"ipc://{folder}/w.sock"
    if engine is None:
        engine = EchoEngine(replace(CONTRACT, cache_bytes=items * ITEM_BYTES), pause_s=pause_s)
    async with AsyncExitStack() as stack:
        listening = WorkerListener(address, key=KEY, contract=engine.contract, limits=limits)
        listener = await stack.enter_async_context(listening)
        path = memory_path(address)
        assert path is not None
        borrowers = await stack.enter_async_context(Borrower(path))
        adapters = engine if isinstance(engine, AdaptingEngine) else None
        turns = EngineTurns(window)
        worker = Worker(engine, listener, borrowers, turns=turns, progress_s=progress_s, adapters=adapters)
        tasks = [asyncio.create_task(worker.run())]
        made = [await _frontend(stack, address, tasks, number, shared_items, limits) for number in range(frontends)]
        try:
            await until(lambda: all(one.worker.is_connected for one in made))
            yield Rig(engine, worker, listener, made)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _frontend(
    stack: AsyncExitStack,
    address: str,
    tasks: list[asyncio.Task[None]],
    number: int,
    shared_items: int | None,
    limits: Limits | None,
) -> Frontend:
    backoff = Backoff(first_s=0.01, max_s=0.05)
    link = FrontendLink(address, key=KEY, frontend_id=f"f{number}", backoff=backoff, limits=limits)
    await stack.enter_async_context(link)
    memory = None if shared_items is None else SharedCache.create(shared_items * (ITEM_BYTES + 128))
    meter, lookups = Meter(), CacheLookups()
    remote = RemoteWorker(link, memory=memory, lookups=lookups, meter=meter)
    meter.watch(lookups.samples)
    tasks.append(asyncio.create_task(remote.run()))
    return Frontend(remote, meter, lookups, memory)
