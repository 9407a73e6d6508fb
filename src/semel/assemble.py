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
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from semel.cache import Borrowers, Cache, LruCache, NoCache, SharedCache
from semel.core import Contract, Feature, Key, Media, Modality, Target
from semel.processing import Description, Pool, find_folder
from semel.processing.pool import MAX_MEMORY_BYTES
from semel.processing.process import PoolProcess
from semel.processing.processor import ProcessorKind, load_processor
from semel.render import ChatRenderer, ChatTemplate, LayoutCache, Lookups, Pipeline, Process, Tokenizer, warm_up
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


def assemble_pipeline(
    folder: Path,
    target: Target,
    key: Key,
    *,
    chat_template: str | Path | None = None,
    processor: ProcessorKind = "auto",
) -> Pipeline:
    """A pipeline that preprocesses in a thread of this process, for use as a library."""
    loaded = load_processor(processor, folder, target)
    executor = ThreadPoolExecutor(1, thread_name_prefix="semel-processor")  # HF processors are not thread-safe

    async def process(media: Media, options: Mapping[str, object], **_: object) -> Feature:
        return await asyncio.get_running_loop().run_in_executor(executor, loaded.process, media, options)

    return _pipeline(folder, process, Description.of(loaded), key, chat_template)


def _pipeline(
    folder: Path,
    process: Process,
    described: Description,
    key: Key,
    chat_template: str | Path | None,
    cache: Cache | None = None,
    count: Lookups | None = None,
) -> Pipeline:
    tokenizer = Tokenizer.load(folder)
    renderer = None
    if not described.encoder_decoder:
        template = ChatTemplate.load(folder, override=chat_template)
        renderer = ChatRenderer(template, tokenizer, described.placeholders, described.insertion, described.written)
    held = NoCache() if cache is None else cache  # an empty cache is false
    pipeline = Pipeline(tokenizer, renderer, process, described.fingerprint, key, held)
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
    processor: ProcessorKind = "auto"


async def run_worker(options: WorkerOptions) -> None:
    """Embed an engine and serve it until SIGTERM; raises if the engine dies."""
    from semel.engine.vllm.arguments import parse_engine_flags
    from semel.engine.vllm.encoder_metrics import EncoderPage
    from semel.engine.vllm.engine import VllmEngine

    page = EncoderPage.create()
    arguments = parse_engine_flags(
        options.model, options.engine_flags, encoder_planning=options.encoder_planning, metrics=page.path
    )
    with _engine_sockets():
        engine = VllmEngine.start(arguments, processor=options.processor)
        try:
            await _serve_engine(options, engine, page)
        finally:
            await engine.close()


@contextlib.contextmanager
def _engine_sockets() -> Iterator[None]:
    """A folder for the sockets between vLLM's processes, which leave them behind; unless one is set already."""
    from semel.engine.vllm.compat import SOCKET_FOLDER

    if SOCKET_FOLDER in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="semel-", ignore_cleanup_errors=True) as folder:
        os.environ[SOCKET_FOLDER] = folder
        try:
            yield
        finally:
            del os.environ[SOCKET_FOLDER]


async def _serve_engine(options: WorkerOptions, engine: VllmEngine, page: EncoderPage) -> None:
    from semel.worker.worker import Worker

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
    processor: ProcessorKind = "auto"


async def run_frontend(options: FrontendOptions) -> None:
    """Serve OpenAI's API over HTTP until SIGTERM."""
    from semel.frontend.app import create_app
    from semel.frontend.service import Service
    from semel.http import HttpServer

    service = Service(max_body_bytes=options.max_body_bytes)
    meter, lookups = Meter(), CacheLookups()
    cache, layouts = create_cache(options.cache_kind, options.cache_bytes), LayoutCache()
    server = HttpServer(create_app(service, meter), options.host, options.port)
    meter.watch(lookups.samples)
    meter.watch(partial(_cache_samples, cache))
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(cache.close)
        fleet = await _link_all(options, stack, cache, layouts, lookups, meter)
        serving = asyncio.create_task(server.serve())
        linking = asyncio.create_task(fleet.run())
        following = asyncio.create_task(_follow(options, service, fleet, cache, layouts, lookups, meter))
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
    options: FrontendOptions,
    stack: contextlib.AsyncExitStack,
    cache: Cache,
    layouts: LayoutCache,
    lookups: CacheLookups,
    meter: Meter,
) -> Fleet:
    from semel.frontend.fleet import Fleet
    from semel.frontend.remote import RemoteWorker

    frontend_id = f"{socket.gethostname()}-{os.getpid()}"
    memory = cache if isinstance(cache, SharedCache) else None

    def forget() -> None:
        cache.clear()
        layouts.clear()

    workers = []
    for address in options.workers:
        link = await stack.enter_async_context(FrontendLink(address, key=options.key, frontend_id=frontend_id))
        workers.append(RemoteWorker(link, memory=memory, lookups=lookups, meter=meter, on_forget=forget))
    fleet = Fleet(workers)
    meter.watch(partial(_fleet_samples, fleet))
    return fleet


async def _follow(
    options: FrontendOptions,
    service: Service,
    fleet: Fleet,
    cache: Cache,
    layouts: LayoutCache,
    lookups: CacheLookups,
    meter: Meter,
) -> None:
    """Serve while there is a worker whose contract we can keep, and say why not while there is none."""
    from semel.frontend.service import Serving

    folder = find_folder(options.model)
    pool: Pool | None = None
    memory = cache if isinstance(cache, SharedCache) else None
    # They import their libraries while the engine loads; what to load they are told by the worker's contract.
    descriptor = None if memory is None else memory.fileno()
    spawning = (PoolProcess.spawn(MAX_MEMORY_BYTES, descriptor, in_background=True) for _ in range(options.processes))
    prepared = [await process for process in spawning]
    try:
        while True:
            await fleet.changed()
            contract = fleet.contract
            if pool is None and contract is not None:
                service.suspend("the model's processor is being loaded")
                pool = await Pool.start(
                    folder,
                    contract.target,
                    processes=options.processes,
                    memory=memory,
                    processor=options.processor,
                    prepared=prepared,
                )
                prepared = []
                meter.watch(partial(_pool_samples, pool))
                gc.freeze()  # what is loaded by now stays: a collection during a large request need not walk it
                pipeline = _pipeline(
                    folder,
                    pool.process,
                    pool.description,
                    options.key,
                    options.chat_template,
                    cache,
                    partial(_count_processor, lookups, fleet, cache),
                )
                pipeline = replace(pipeline, layouts=layouts, process_apart=partial(pool.process, apart=True))
                meter.watch(partial(_flight_samples, pipeline))
                service.suspend("the model's processor is being warmed up")
                await warm_up(pipeline, contract.max_items, processes=len(pool.pids))
                pool.processed = pool.failed = 0
            if pool is not None:
                fleet.admit(partial(_mismatch, pool))
            if (contract := fleet.contract) is None or pool is None:
                service.suspend(fleet.reason)
                continue
            service.begin(Serving(contract.model, fleet, contract, pipeline))
            logger.info("serving %s with %d of %d workers", contract.model, len(fleet.serving), len(fleet.workers))
    finally:
        for process in prepared:
            await process.end(within_s=0)
            await process.release()
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
        "model folder, the same --processor and the same versions of transformers, torch and pillow (and vllm, where "
        "the fingerprint names it)"
    )
