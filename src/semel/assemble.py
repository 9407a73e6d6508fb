"""Puts the parts together into what runs: a pipeline for libraries, and the processes of a worker and of a frontend.

The only place that knows all the parts. What is decided here is who is given what, and in which order things end.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from semel.cache import Borrowers, Cache, LruCache, NoCache, SharedCache
from semel.core import Contract, Feature, Key, Media, Modality, Target
from semel.errors import ConfigError
from semel.processing import HfProcessor, Pool, family_of, find_folder, read_config
from semel.render import ChatRenderer, ChatTemplate, Lookups, Pipeline, Process, Tokenizer
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
    WORKER_CONNECTED,
    WORKER_RUNNING,
)
from semel.wire.zmq import FrontendLink, WorkerListener, memory_path

if TYPE_CHECKING:
    from semel.engine.vllm.encoder_metrics import EncoderPage
    from semel.engine.vllm.engine import VllmEngine
    from semel.frontend.fleet import Fleet
    from semel.frontend.service import Service
    from semel.worker.worker import Worker

__all__ = [
    "CacheKind",
    "FrontendOptions",
    "WorkerOptions",
    "assemble_pipeline",
    "create_cache",
    "run_frontend",
    "run_worker",
]

CacheKind = Literal["shared", "lru"]

_HITS_S: Final = 10.0

logger = logging.getLogger(__name__)


def assemble_pipeline(folder: Path, target: Target, key: Key, *, chat_template: str | Path | None = None) -> Pipeline:
    """A pipeline that preprocesses in a thread of this process, for use as a library."""
    processor = HfProcessor.load(folder, target)
    executor = ThreadPoolExecutor(1, thread_name_prefix="semel-processor")  # HF processors are not thread-safe

    async def process(media: Media, options: Mapping[str, object]) -> Feature:
        return await asyncio.get_running_loop().run_in_executor(executor, processor.process, media, options)

    return _pipeline(folder, process, processor.fingerprint, processor.placeholders, key, chat_template)


def _pipeline(
    folder: Path,
    process: Process,
    fingerprint: str,
    placeholders: Mapping[Modality, str],
    key: Key,
    chat_template: str | Path | None,
    cache: Cache | None = None,
    count: Lookups | None = None,
) -> Pipeline:
    family = family_of(read_config(folder).get("model_type", ""))
    tokenizer = Tokenizer.load(folder)

    def insertion(modality: Modality, index: int, /) -> str:
        if (placeholder := placeholders.get(modality)) is None:
            raise ConfigError(f"this model takes no {modality}")
        return family.insertion(modality, index, placeholder)

    renderer = None
    if not family.encoder_decoder:
        renderer = ChatRenderer(ChatTemplate.load(folder, override=chat_template), tokenizer, placeholders, insertion)
    pipeline = Pipeline(tokenizer, renderer, process, fingerprint, key, cache or NoCache())
    return pipeline if count is None else replace(pipeline, lookups=count)


def create_cache(kind: CacheKind, capacity_bytes: int) -> Cache:
    """A frontend's feature cache; without any bytes there is none, and everything works without reuse."""
    if capacity_bytes <= 0:
        return NoCache()
    return SharedCache.create(capacity_bytes) if kind == "shared" else LruCache(capacity_bytes)


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What a worker process was asked for."""

    model: str
    listen: str
    key: Key
    engine_flags: Sequence[str]
    encoder_planning: bool
    admin_port: int | None
    admin_key: str | None
    drain_s: float


async def run_worker(options: WorkerOptions) -> None:
    """Embed an engine and serve it until SIGTERM; raises if the engine dies."""
    from semel.engine.vllm.arguments import parse_engine_flags
    from semel.engine.vllm.encoder_metrics import EncoderPage
    from semel.engine.vllm.engine import VllmEngine
    from semel.worker.worker import Worker

    page = EncoderPage.create()
    arguments = parse_engine_flags(
        options.model, options.engine_flags, encoder_planning=options.encoder_planning, metrics=page.path
    )
    engine = VllmEngine.start(arguments)
    try:
        async with contextlib.AsyncExitStack() as stack:
            listener = WorkerListener(options.listen, key=options.key, contract=engine.contract)
            await stack.enter_async_context(listener)
            path = memory_path(options.listen)
            borrowers = None if path is None else await stack.enter_async_context(Borrowers(path))
            logger.info("the worker for %s listens at %s", engine.contract.model, listener.address)
            worker = Worker(engine, listener, borrowers)
            if options.admin_port is not None:
                await stack.enter_async_context(_admin(options, engine, worker, page))
            serving = asyncio.create_task(worker.run())
            await _until_stopped(serving)
            if not serving.done():
                await worker.drain(options.drain_s)
                serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            if not serving.cancelled() and (error := serving.exception()) is not None:
                raise error
    finally:
        await engine.close()


@contextlib.asynccontextmanager
async def _admin(options: WorkerOptions, engine: VllmEngine, worker: Worker, page: EncoderPage) -> AsyncIterator[None]:
    """Serve the admin address, on loopback: metrics, and with a key injection and reset."""
    from semel.http import HttpServer
    from semel.worker.admin import create_admin_app

    assert options.admin_port is not None
    meter, lookups = Meter(), CacheLookups()
    for read in (page.samples, worker.samples, partial(_eviction_samples, engine), lookups.samples):
        meter.watch(read)

    def count(modality: Modality, hit: bool) -> None:
        lookups.count(engine.contract.model, modality, "worker", 1, hit)

    app = create_admin_app(engine, meter, key=options.admin_key, count=count, reset=worker.reset)
    server = HttpServer(app, "127.0.0.1", options.admin_port)
    serving = asyncio.create_task(server.serve())
    try:
        yield
    finally:
        server.stop()
        await asyncio.gather(serving, return_exceptions=True)


async def _until_stopped(*tasks: asyncio.Task[None]) -> None:
    """Wait for SIGTERM or SIGINT, or for the first of the tasks to end."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({stopping, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()


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
    max_body_bytes: int
    cache_kind: CacheKind
    cache_bytes: int


async def run_frontend(options: FrontendOptions) -> None:
    """Serve OpenAI's API over HTTP until SIGTERM."""
    from semel.frontend.app import create_app
    from semel.frontend.service import Service
    from semel.http import HttpServer

    service = Service(max_body_bytes=options.max_body_bytes)
    meter, lookups = Meter(), CacheLookups()
    cache = create_cache(options.cache_kind, options.cache_bytes)
    server = HttpServer(create_app(service, meter), options.host, options.port)
    meter.watch(lookups.samples)
    meter.watch(partial(_cache_samples, cache))
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(cache.close)
        fleet = await _link_all(options, stack, cache, lookups, meter)
        serving = asyncio.create_task(server.serve())
        linking = asyncio.create_task(fleet.run())
        following = asyncio.create_task(_follow(options, service, fleet, cache, lookups, meter))
        telling = asyncio.create_task(_tell_hits(lookups))
        await _until_stopped(serving, linking, following)
        service.suspend("the frontend is shutting down")
        server.stop()
        following.cancel()
        telling.cancel()
        ended = await asyncio.gather(serving, following, return_exceptions=True)
        linking.cancel()
        for result in (*ended, *await asyncio.gather(linking, return_exceptions=True)):
            if isinstance(result, Exception):
                raise result


async def _link_all(
    options: FrontendOptions, stack: contextlib.AsyncExitStack, cache: Cache, lookups: CacheLookups, meter: Meter
) -> Fleet:
    from semel.frontend.fleet import Fleet
    from semel.frontend.remote import RemoteWorker

    frontend_id = f"{socket.gethostname()}-{os.getpid()}"
    memory = cache if isinstance(cache, SharedCache) else None
    workers = []
    for address in options.workers:
        link = await stack.enter_async_context(FrontendLink(address, key=options.key, frontend_id=frontend_id))
        workers.append(RemoteWorker(link, memory=memory, lookups=lookups, meter=meter, on_forget=cache.clear))
    fleet = Fleet(workers)
    meter.watch(partial(_fleet_samples, fleet))
    return fleet


async def _follow(
    options: FrontendOptions, service: Service, fleet: Fleet, cache: Cache, lookups: CacheLookups, meter: Meter
) -> None:
    """Serve while there is a worker whose contract we can keep, and say why not while there is none."""
    from semel.frontend.service import Serving

    folder = find_folder(options.model)
    pool: Pool | None = None
    try:
        while True:
            await fleet.changed()
            contract = fleet.contract
            if pool is None and contract is not None:
                service.suspend("the model's processor is being loaded")
                memory = cache if isinstance(cache, SharedCache) else None
                pool = await Pool.start(folder, contract.target, processes=options.processes, memory=memory)
                meter.watch(partial(_pool_samples, pool))
                gc.freeze()  # what is loaded by now stays: a collection during a large request need not walk it
                pipeline = _pipeline(
                    folder,
                    pool.process,
                    pool.description.fingerprint,
                    pool.description.placeholders,
                    options.key,
                    options.chat_template,
                    cache,
                    partial(_count_processor, lookups, fleet, cache),
                )
                meter.watch(partial(_flight_samples, pipeline))
            if pool is not None:
                fleet.admit(partial(_mismatch, pool))
            if (contract := fleet.contract) is None or pool is None:
                service.suspend(fleet.reason)
                continue
            service.begin(Serving(contract.model, fleet, contract, pipeline))
            logger.info("serving %s with %d of %d workers", contract.model, len(fleet.serving), len(fleet.workers))
    finally:
        if pool is not None:
            await pool.close()


def _count_processor(
    lookups: CacheLookups, fleet: Fleet, cache: Cache, modality: Modality, count: int, hit: bool
) -> None:
    """Count a lookup in the processor's tier; nothing moves while nothing is cached anywhere (D8)."""
    contract = fleet.contract
    if contract is not None and (cache.capacity or contract.cache_bytes):
        lookups.count(contract.model, modality, "processor", count, hit)


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


def _eviction_samples(engine: VllmEngine) -> Iterator[Sample]:
    yield MM_CACHE_EVICTIONS, engine.item_cache.evictions, ("worker",)


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
        "model folder and the same versions of transformers, torch and pillow"
    )
