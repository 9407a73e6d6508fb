"""Some workers behind one frontend, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from semel.core import Digest, Feature, Submission
from semel.fleet.ejection import EjectionLimits
from semel.fleet.fleet import Fleet
from semel.fleet.retry_policy import FleetHealth
from semel.fleet.stream import StreamedAnswer
from semel.fleet.worker import RemoteWorker
from semel.telemetry import Meter
from tests.wire.examples import digest_of
from tests.worker.pairing import Frontend, Rig, feature, prompt, rig


@asynccontextmanager
async def several(folder: Path, names: str = "ab", **options: Any) -> AsyncIterator[list[Rig]]:
    """A rig for each name, in a folder of its own."""
    async with AsyncExitStack() as stack:
        made = []
        for name in names:
            (folder / name).mkdir(mode=0o700)
            made.append(await stack.enter_async_context(rig(folder / name, **options)))
        yield made


@contextmanager
def standing(rigs: Iterable[Rig]) -> Iterator[None]:
    """Inside, the engines take requests and make no step: no answer begins, however long something else takes."""
    engines = [one.engine for one in rigs]
    for engine in engines:
        engine.hangs = True
    try:
        yield
    finally:
        for engine in engines:
            engine.hangs = False


@dataclass
class Workers:
    """Workers, one frontend, and a clock that stands still."""

    rigs: list[Rig]
    now: float = 0.0
    meter: Meter = field(default_factory=Meter)
    numbers: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self, eject_after: int = 3) -> None:
        health = FleetHealth(EjectionLimits(eject_after), meter=self.meter, now=lambda: self.now)
        self.fleet = Fleet([side.worker for side in self.sides], health=health)

    @property
    def sides(self) -> list[Frontend]:
        return [one.frontends[0] for one in self.rigs]

    def rig_of(self, worker: RemoteWorker) -> Rig:
        (found,) = [one for one in self.rigs if one.frontends[0].worker is worker]
        return found

    @property
    def busy(self) -> Rig:
        """The one that has got a request."""
        (busy,) = [one for one in self.rigs if one.engine.submissions]
        return busy

    @property
    def queries(self) -> float:
        return sum(side.metric("semel_mm_cache_queries_total") for side in self.sides)

    @property
    def client_queries(self) -> list[int]:
        """Of each engine, lookups of items that clients sent."""
        return sorted(one.engine.client_queries for one in self.rigs)

    @property
    def ejected(self) -> list[RemoteWorker]:
        return [worker for worker in self.fleet.workers if self.fleet.is_ejected(worker)]

    @property
    def available(self) -> list[RemoteWorker]:
        """The workers that get requests."""
        left_out = self.fleet._left_out()
        return [worker for worker in self.fleet.serving if not left_out >> self.fleet._numbers[worker] & 1]

    def metric(self, name: str) -> float:
        families = self.meter.registry.collect()
        return sum(one.value for family in families for one in family.samples if one.name == name)

    async def submit(
        self,
        worker: RemoteWorker | None = None,
        kind: type[StreamedAnswer] = StreamedAnswer,
        number: int = 1,
        sampling: Mapping[str, object] | None = None,
        *,
        of_client: bool = False,
    ) -> StreamedAnswer:
        async def make(_: Digest) -> Feature:
            return feature(number)

        worker = worker or self.fleet.choose([digest_of(number)])
        sent = frozenset({digest_of(number)}) if of_client else frozenset[Digest]()
        request_id = f"r{next(self.numbers)}"
        submission = Submission(request_id, prompt([number]), {}, sampling or {}, client_features=sent)
        return await self.fleet.submit(worker, submission, make, kind)

    async def ask(self, *arguments: Any, **more: Any) -> tuple[int, ...]:
        """As `submit`; returns the answer."""
        async with asyncio.timeout(10):
            stream = await self.submit(*arguments, **more)
            try:
                return tuple([token async for output in stream for token in output.token_ids])
            finally:
                await stream.close()
