"""The process of a frontend: HTTP, the links to its workers, its cache and its pool."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from semel.cache import Cache, LayoutCache, LruCache, NoCache, SharedCache
from semel.compose.pipeline import pipeline_of
from semel.core import Contract, Digest, Key, Keyring, Modality
from semel.frontend.budget import Budget, BudgetLimits
from semel.media import DecodeLimits
from semel.media.fetch.fetch import Fetcher, FetchOptions
from semel.processing import Pool, find_folder
from semel.processing.pool.job import OfferLimits
from semel.processing.pool.pool import MAX_MEMORY_BYTES, TIMEOUT_S
from semel.processing.pool.process import PoolProcess
from semel.processing.processor import ProcessorKind
from semel.render import Pipeline, warm_up
from semel.shutdown import ShutdownSignal
from semel.telemetry.lag import LoopLag
from semel.telemetry.lookups import CacheLookups
from semel.telemetry.meter import Meter, Sample
from semel.telemetry.metrics import (
    FLIGHTS_JOINED,
    LEASES,
    MM_CACHE_BYTES,
    MM_CACHE_CAPACITY,
    MM_CACHE_EVICTIONS,
    MM_CACHE_ITEMS,
    POOL_FAILED,
    POOL_PROCESSED,
    POOL_REPLACED,
    REFUSALS,
    STAGE_SECONDS,
    WORKER_CONNECTED,
    WORKER_RUNNING,
)
from semel.telemetry.request_context import traced
from semel.telemetry.tracing import Collector, start_tracing
from semel.wire.zmq import FrontendLink

if TYPE_CHECKING:
    from semel.fleet.discovery import AddressSource
    from semel.fleet.fleet import Fleet
    from semel.fleet.worker import RemoteWorker
    from semel.frontend.http.body import BodyLimits
    from semel.frontend.middleware.concurrency import ConcurrencyLimits
    from semel.frontend.middleware.refusal_rate import RefusalLimits
    from semel.frontend.service import FrontendState
    from semel.web.server import ConnectionLimits, HttpServer

__all__ = ["GC_THRESHOLDS", "CacheKind", "FrontendOptions", "create_cache", "run_frontend"]

CacheKind = Literal["shared", "lru"]

GC_THRESHOLDS: Final = (50_000, 20, 20)
"""How often the collector runs. A request of 32,768 items makes so many objects that with Python's own 700 collections
would take a fifth of its time."""

_HITS_S: Final = 10.0
_MAX_FILES: Final = 65_536

logger = logging.getLogger(__name__)


def create_cache(kind: CacheKind, capacity_bytes: int) -> Cache:
    """A frontend's feature cache; without any bytes there is none, and everything works without reuse."""
    if capacity_bytes <= 0:
        return NoCache()
    return SharedCache.create(capacity_bytes) if kind == "shared" else LruCache(capacity_bytes)


@dataclass(frozen=True, slots=True)
class FrontendOptions:
    """What a frontend process was asked for."""

    model: str
    workers: Sequence[str]
    key: Key
    host: str
    port: int
    chat_template: str | None
    processes: int
    body: BodyLimits
    budget: BudgetLimits
    pace: RefusalLimits
    cache_kind: CacheKind
    cache_bytes: int
    fetching: FetchOptions = field(default_factory=FetchOptions)
    processor: ProcessorKind = "auto"
    api_keys: Keyring = field(default_factory=Keyring)
    metrics_port: int | None = None
    limits: DecodeLimits = field(default_factory=DecodeLimits)
    max_processing_s: float = TIMEOUT_S
    max_processing_bytes: int = MAX_MEMORY_BYTES
    sources: Sequence[AddressSource] = ()
    """What names workers besides those, and may name others later."""

    collector: Collector | None = None
    """Where spans are sent; without one there are none."""

    log_requests: bool = True
    gate: ConcurrencyLimits | None = None
    connections: ConnectionLimits | None = None
    drain_s: float = 25.0
    """For requests in flight when it is stopped."""


async def run_frontend(options: FrontendOptions) -> None:
    """Serve OpenAI's API over HTTP until SIGTERM."""
    from starlette.applications import Starlette

    from semel.frontend.app import create_app
    from semel.frontend.middleware.concurrency import RequestLimiter
    from semel.frontend.service import FrontendState
    from semel.web.server import HttpServer, operator_routes

    _raise_file_limit()
    gate = RequestLimiter(options.gate)
    service = FrontendState(body=options.body, budget=Budget(options.budget), pace=options.pace, gate=gate)
    tracing = start_tracing(options.collector, "semel-frontend")
    parts = _Parts(options, create_cache(options.cache_kind, options.cache_bytes))
    app = create_app(service, parts.meter, options.api_keys, tracing=tracing, log_requests=options.log_requests)
    count = partial(parts.meter.count, REFUSALS)
    server = HttpServer(app, options.host, options.port, options.connections, count)
    parts.meter.watch(tracing.samples)
    parts.meter.watch(parts.lookups.samples)
    parts.meter.watch(partial(_cache_samples, parts.cache))
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(tracing.close)
        stack.callback(parts.cache.close)
        stack.callback(LoopLag(parts.meter).close)
        if options.metrics_port is not None:
            metrics = HttpServer(Starlette(routes=operator_routes(parts.meter)), "127.0.0.1", options.metrics_port)
            await stack.enter_async_context(metrics.running())
        fleet, keep_linked = await parts.link(stack)
        serving = asyncio.create_task(server.serve())
        linking = asyncio.create_task(keep_linked())
        following = asyncio.create_task(parts.follow(fleet, service))
        telling = asyncio.create_task(_tell_hits(parts.lookups))
        stopping = ShutdownSignal.listening()
        if await stopping.wait(serving, linking, following):
            await _drain(service, server, stopping, options.drain_s)
        else:
            service.drain("the frontend has failed")
        server.stop(at_once=bool(service.gate.requests))
        following.cancel()
        telling.cancel()
        ended = await asyncio.gather(serving, following, return_exceptions=True)
        linking.cancel()
        for result in (*ended, *await asyncio.gather(linking, return_exceptions=True)):
            if isinstance(result, Exception):
                raise result


async def _drain(service: FrontendState, server: HttpServer, stopping: ShutdownSignal, within_s: float) -> None:
    """Answer what was taken, and refuse what comes; probes are answered all the while."""
    service.drain("the frontend is shutting down")
    server.release()
    logger.info("the frontend ends when its %d requests have, within %g s", service.gate.requests, within_s)
    await stopping.unless_forced(service.gate.until_empty(within_s))
    if service.gate.requests:
        logger.warning("%d requests are cut off: raise --drain-s to let them end", service.gate.requests)


def _raise_file_limit() -> None:
    """Every connection takes a descriptor, and what a process gets without asking is often only 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(_MAX_FILES, hard) if hard != resource.RLIM_INFINITY else _MAX_FILES
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """What the links, the pool and the pipeline of one frontend share."""

    options: FrontendOptions
    cache: Cache
    layouts: LayoutCache[Digest] = field(default_factory=LayoutCache)
    lookups: CacheLookups = field(default_factory=CacheLookups)
    meter: Meter = field(default_factory=Meter)

    @property
    def memory(self) -> SharedCache | None:
        """The cache, if other processes can share it."""
        return self.cache if isinstance(self.cache, SharedCache) else None

    async def link(self, stack: contextlib.AsyncExitStack) -> tuple[Fleet, Callable[[], Coroutine[None, None, None]]]:
        """Connect to every worker, until the stack is left; and a call that keeps to the roster from then on."""
        from semel.fleet.discovery import WorkerDirectory
        from semel.fleet.fleet import Fleet
        from semel.fleet.membership import Membership

        fleet, roster = Fleet(), WorkerDirectory(self.options.workers, self.options.sources)
        members = Membership(fleet, self._connect)
        stack.push_async_callback(members.close)
        for address in await roster.open():
            await members.join(address)
        self.meter.watch(partial(_fleet_samples, fleet))
        return fleet, partial(members.run, roster.lists())

    @contextlib.asynccontextmanager
    async def _connect(self, address: str) -> AsyncIterator[RemoteWorker]:
        from semel.fleet.worker import RemoteWorker

        async with FrontendLink(
            address, key=self.options.key, frontend_id=f"{socket.gethostname()}-{os.getpid()}"
        ) as link:
            yield RemoteWorker(link, memory=self.memory, lookups=self.lookups, meter=self.meter, on_forget=self._forget)

    async def follow(self, fleet: Fleet, service: FrontendState) -> None:
        """Serve while there is a worker whose contract we can keep, and say why not while there is none."""
        from semel.frontend.service import ServedModel

        folder = find_folder(self.options.model)
        async with contextlib.AsyncExitStack() as stack:
            prepared = await self._prepare(stack)
            contract = await _first_contract(fleet, service)
            service.suspend("the model's processor is being loaded")
            pool = await self._start_pool(stack, folder, contract, prepared)
            pipeline = self._pipeline(folder, pool, fleet, self._fetcher(stack), contract.max_tokens)
            service.suspend("the model's processor is being warmed up")
            await warm_up(pipeline, contract.max_items, processes=len(pool.pids))
            pool.forget_counts()
            fleet.admit(partial(_mismatch, pool))
            while True:
                await fleet.changed()
                if (current := fleet.contract) is None:
                    service.suspend(fleet.reason)
                else:
                    service.begin(ServedModel(fleet, current, pipeline))
                    counts = len(fleet.serving), len(fleet.workers)
                    logger.info("serving %s with %d of %d workers", current.model, *counts)

    async def _prepare(self, stack: contextlib.AsyncExitStack) -> list[PoolProcess]:
        """Processes that import their libraries while the engine loads: what to load, a worker's contract tells."""
        memory = None if self.memory is None else self.memory.fileno()
        prepared: list[PoolProcess] = []
        stack.push_async_callback(_end_all, prepared)
        for _ in range(self.options.processes):  # one by one: what was started is ended, also if the next cannot start
            prepared += [await PoolProcess.spawn(self.options.max_processing_bytes, memory, in_background=True)]
        return prepared

    async def _start_pool(
        self, stack: contextlib.AsyncExitStack, folder: Path, contract: Contract, prepared: list[PoolProcess]
    ) -> Pool:
        ready, prepared[:] = tuple(prepared), ()  # they are the pool's from now on, also if it cannot start
        pool = await Pool.start(
            folder,
            contract.target,
            processes=self.options.processes,
            limits=self.options.limits,
            timeout_s=self.options.max_processing_s,
            max_memory_bytes=self.options.max_processing_bytes,
            memory=self.memory,
            offers=OfferLimits(max_tokens=contract.max_tokens),
            processor=self.options.processor,
            prepared=ready,
        )
        stack.push_async_callback(pool.close)
        self.meter.watch(partial(_pool_samples, pool))
        gc.freeze()  # what is loaded by now stays: a collection during a large request need not walk it
        gc.set_threshold(*GC_THRESHOLDS)
        return pool

    def _fetcher(self, stack: contextlib.AsyncExitStack) -> Fetcher:
        fetcher = Fetcher(self.options.fetching)
        stack.push_async_callback(fetcher.close)
        self.meter.watch(fetcher.samples)
        return fetcher

    def _pipeline(self, folder: Path, pool: Pool, fleet: Fleet, fetcher: Fetcher, max_tokens: int) -> Pipeline:
        options, timings = self.options, partial(self.meter.observe, STAGE_SECONDS)
        pipeline = replace(
            pipeline_of(folder, pool.process, pool.description, options.key, options.chat_template),
            cache=self.cache,
            lookups=partial(self._count, fleet),
            layouts=self.layouts,
            max_tokens=max_tokens,
            process_apart=partial(pool.process, apart=True),
            lay_out=pool.lay_out,
            cut=pool.cut,
            fetch=fetcher.fetch,
            timings=timings if options.collector is None else traced(timings),
        )
        self.meter.watch(partial(_flight_samples, pipeline))
        return pipeline

    def _forget(self) -> None:
        self.cache.clear()
        self.layouts.clear()

    def _count(self, fleet: Fleet, modality: Modality, count: int, hit: bool) -> None:
        """Count a lookup in the processor's tier; nothing moves while nothing is cached anywhere (D8)."""
        contract = fleet.contract
        if contract is not None and (self.cache.capacity or contract.cache_bytes):
            self.lookups.count(contract.model, modality, "processor", count, hit)


async def _first_contract(fleet: Fleet, service: FrontendState) -> Contract:
    """Wait for the first worker."""
    while True:
        await fleet.changed()
        if (contract := fleet.contract) is not None:
            return contract
        service.suspend(fleet.reason)


async def _end_all(processes: list[PoolProcess]) -> None:
    for process in processes:
        await process.end(within_s=0)
        await process.release()


async def _tell_hits(lookups: CacheLookups) -> None:
    while True:
        await asyncio.sleep(_HITS_S)
        if (line := lookups.line()) is not None:
            logger.info("%s", line)


def _fleet_samples(fleet: Fleet) -> Iterator[Sample]:
    for worker in fleet.workers:
        yield WORKER_CONNECTED, worker.is_connected, (worker.name,)
        yield WORKER_RUNNING, worker.running, (worker.name,)


def _cache_samples(cache: Cache) -> Iterator[Sample]:
    tier = ("processor",)
    yield MM_CACHE_ITEMS, len(cache), tier
    yield MM_CACHE_BYTES, cache.nbytes, tier
    yield MM_CACHE_CAPACITY, cache.capacity, tier
    yield MM_CACHE_EVICTIONS, cache.evictions, tier
    if isinstance(cache, SharedCache):
        yield LEASES, cache.leases, ()


def _flight_samples(pipeline: Pipeline) -> Iterator[Sample]:
    yield FLIGHTS_JOINED, pipeline.flight.joined, ()


def _pool_samples(pool: Pool) -> Iterator[Sample]:
    yield POOL_PROCESSED, pool.processed, ()
    yield POOL_FAILED, pool.failed, ()
    yield POOL_REPLACED, pool.replaced, ()


def _mismatch(pool: Pool, contract: Contract) -> str | None:
    ours = pool.description.fingerprint
    if contract.fingerprint == ours:
        return None
    return (
        f"the worker's processor ({contract.fingerprint[:12]}) is not ours ({ours[:12]}): start both with the same "
        "model folder, the same --processor and the same versions of transformers, torch and pillow (and vllm, where "
        "the fingerprint names it)"
    )
