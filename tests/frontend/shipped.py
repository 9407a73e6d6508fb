"""A frontend as `semel frontend` composes it, at a worker with an echo engine: all but the pool's processes is shipped.

The pool is one of this process. It makes a feature of any bytes, remembers what it was asked for, and waits before it
answers, if it is told to.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import httpx
import pytest

from semel.compose import frontend as assembly
from semel.core import Assembly, Contract, Feature, Keyring, Layout, Media
from semel.fleet.fleet import Fleet
from semel.fleet.worker import RemoteWorker
from semel.frontend.app import create_app
from semel.frontend.service import FrontendState
from semel.key_files import ProcessKeys
from semel.lab.testing.engine import EchoEngine
from semel.media.fetch.fetch import FetchOptions
from semel.media.fetch.settings import FetchSettings
from semel.processing import Pool
from semel.processing.pool.pipe import Description
from semel.render.file_sources import FileSources
from semel.settings.frontend import DiscoverySettings, FrontendSettings, PreprocessingSettings, ServingSettings
from semel.store.bindings import open_bindings
from semel.store.settings import MediaStoreSettings
from semel.store.store import open_store
from semel.wire.zmq import WorkerListener
from semel.worker.worker import Worker
from tests.frontend.rig import CONTRACT, KEY
from tests.interpreter import restored_interpreter
from tests.render.conftest import PLACEHOLDERS
from tests.render.drawn import drawn
from tests.waiting import until

DRAWN = Description("drawn", PLACEHOLDERS, encoder_decoder=False)

Kind = Literal["process", "apart", "lay out"]


@dataclass
class DrawnPool:
    """A pool of so many processes, none of which is one."""

    processes: int = 2
    waits: bool = False
    """Whether an item is made only when it is let go."""

    calls: list[tuple[Kind, int]] = field(default_factory=list)
    in_flight: dict[int, asyncio.Event] = field(default_factory=dict)
    waiting: Mapping[str, int] = field(default_factory=dict)
    busy: int = 0
    decoded: int = 0
    processed: int = 0
    failed: int = 0
    assembled: int = 0
    replaced: int = 0
    description: Description = DRAWN

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(range(self.processes))

    @property
    def sandboxed(self) -> Mapping[str, int]:
        return {}

    @property
    def refusal(self) -> str:
        return ""

    async def process(
        self,
        media: Media,
        options: Mapping[str, object],
        *,
        group: object = None,
        tenant: str = "",
        apart: bool = False,
        spend: object = None,
    ) -> Feature:
        del options, group, tenant, spend
        await self._turn("apart" if apart else "process", number_of(media))
        self.processed += 1
        return drawn(replace(media, data=str(number_of(media)).encode()))

    async def assemble(self, token_ids: object, items: object, **_: object) -> Assembly:
        raise NotImplementedError

    async def lay_out(
        self, media: Media, options: Mapping[str, object], *, group: object = None, tenant: str = ""
    ) -> Layout:
        del options, group, tenant
        await self._turn("lay out", number_of(media))
        return drawn(replace(media, data=str(number_of(media)).encode())).layout

    async def cut(self, media: Media, spend: Callable[[int], None]) -> Any:
        raise NotImplementedError

    async def count_pages(self, document: Media, **_: object) -> int:
        raise NotImplementedError

    async def tokenize(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[list[int]]:
        raise NotImplementedError

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        raise NotImplementedError

    def forget_warm_up(self) -> None:
        self.processed = self.failed = 0

    async def close(self) -> None:
        """Nothing runs."""

    async def _turn(self, kind: Kind, number: int) -> None:
        self.calls.append((kind, number))
        if self.waits:
            assert number not in self.in_flight, "equal work in flight is one"
            self.in_flight[number] = asyncio.Event()
            try:
                await self.in_flight[number].wait()
            finally:
                del self.in_flight[number]
        else:
            await asyncio.sleep(0)


def number_of(media: Media) -> int:
    return int(media.data) if media.data.isdigit() else crc32(media.data)


@dataclass
class Frontend:
    """One frontend: its application, and the parts that it was composed of."""

    client: httpx.AsyncClient
    parts: assembly._Parts
    pool: DrawnPool
    service: FrontendState
    fleet: Fleet

    @property
    def remote(self) -> RemoteWorker:
        """Its side of the worker."""
        (worker,) = self.fleet.workers
        return worker

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a counter over the label values that are not named."""
        return sum(
            sample.value
            for family in self.parts.meter.registry.collect()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


@dataclass
class Shipped:
    """A worker and its frontends."""

    engine: EchoEngine
    worker: Worker
    frontends: list[Frontend]


@asynccontextmanager
async def shipped(
    home: Path,
    model: Path,
    *pools: DrawnPool,
    engine_bytes: int = 1 << 20,
    cache_bytes: int = 1 << 20,
    contract: Contract = CONTRACT,
    media_store: MediaStoreSettings | None = None,
    fetch: FetchSettings | None = None,
) -> AsyncIterator[Shipped]:
    """As many frontends as pools, each until it serves. Each opens the media store for itself, if there is one."""
    address = f"ipc://{home}/w.sock"
    engine = EchoEngine(replace(contract, cache_bytes=engine_bytes))
    tasks: list[asyncio.Task[None]] = []
    async with AsyncExitStack() as stack:
        stack.enter_context(restored_interpreter())
        listener = await stack.enter_async_context(WorkerListener(address, key=KEY, contract=engine.contract))
        worker = Worker(engine, listener)
        tasks.append(asyncio.create_task(worker.run()))
        try:
            serving = ServingSettings(
                fetch=fetch or FetchSettings(),
                media_store=media_store or MediaStoreSettings(),
                preprocessing=PreprocessingSettings(processes=0),
            )
            made = [await _frontend(stack, tasks, address, model, pool, cache_bytes, serving) for pool in pools]
            yield Shipped(engine, worker, made)
        finally:
            for task in reversed(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _frontend(
    stack: AsyncExitStack,
    tasks: list[asyncio.Task[None]],
    address: str,
    model: Path,
    pool: DrawnPool,
    nbytes: int,
    serving: ServingSettings,
) -> Frontend:
    settings = FrontendSettings(str(model), discovery=DiscoverySettings((address,)), serving=serving)
    store, bindings = open_store(serving.media_stores()[0], KEY), open_bindings(serving.media_store, KEY)
    keys, cache = ProcessKeys.of_fleet_key(KEY, "frontend"), assembly.create_cache("lru", nbytes)
    fetching = FetchOptions.of(serving.fetch)
    parts = assembly._Parts(settings, keys, cache, FileSources.of(store, bindings), fetching=fetching)
    parts.meter.watch(parts.lookups.samples)
    parts.meter.watch(parts.files.samples)
    service = FrontendState(media_store=store)
    if store is not None:
        tasks.append(asyncio.create_task(store.run()))
    if bindings is not None:
        tasks.append(asyncio.create_task(bindings.run()))
        await until(lambda: bindings._creates is not None)
    fleet, keep_linked = await parts.link(stack)

    async def start(*_: object, **__: object) -> DrawnPool:
        return pool

    waits, pool.waits = pool.waits, False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pool, "start", start)
        following = asyncio.create_task(parts.follow(fleet, service))
        tasks += [asyncio.create_task(keep_linked()), following]
        await until(lambda: not service.reason or following.done())
    if following.done():
        following.result()
    pool.waits = waits
    app = create_app(service, parts.meter, Keyring())
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://frontend", timeout=60)
    return Frontend(await stack.enter_async_context(client), parts, pool, service, fleet)
