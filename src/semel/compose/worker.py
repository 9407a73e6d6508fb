"""The process of a worker: an engine, served to frontends and, at the admin address, to its operator."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from msgspec import UNSET

from semel.cache import Borrower
from semel.compose.interpreter import tune_interpreter
from semel.compose.reloading import ReloadedFiles
from semel.compose.rotation import follow_keys
from semel.core import EngineWindow, Modality
from semel.embeddings.settings import EmbeddingStoreSettings
from semel.engine.owner import owning
from semel.engine.progress import ProgressLimits
from semel.engine.vllm.grammar_limits import GrammarLimits
from semel.errors import EngineHung
from semel.key_files import ProcessKeys, admin_key_file, worker_keys
from semel.processing.processor import ProcessorKind
from semel.settings import (
    SERVICE_NAME,
    TRACES_PROTOCOL,
    WorkerSettings,
    default_folder,
    default_variable,
    embedding_store_nodes,
    read_admin_key,
    trace_collector,
)
from semel.shutdown import ShutdownSignal
from semel.telemetry import metrics
from semel.telemetry.logs import log_samples
from semel.telemetry.lookups import CacheLookups
from semel.telemetry.meter import Meter, Sample
from semel.telemetry.tracing import Collector, check_installed, start_tracing
from semel.wire.zmq import WorkerListener, memory_path
from semel.worker.session_settings import SessionSettings

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from semel.engine import Engine
    from semel.engine.vllm.encoder_metrics import EncoderPage
    from semel.engine.vllm.engine import VllmEngine
    from semel.engine.vllm.tier_config import TierConfig
    from semel.worker.keeper import Keeper
    from semel.worker.worker import Worker

__all__ = ["WorkerOptions", "run_worker", "serve_engine"]

_SERVICE: Final = "semel-worker"
_DRAIN_PUBLISH_S: Final = 10.0
"""How long a worker that ends publishes encoder outputs at the most."""

_HUNG_EXIT_S: Final = 15.0
"""How long a process whose engine was hung has for its own end: what belongs to the engine may be hung as well."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What a worker process was asked for."""

    model: str
    listen: str
    keys: ProcessKeys
    engine_flags: Sequence[str]
    encoder_planning: bool
    admin_port: int | None
    admin_key_file: Path | None
    drain_s: float
    drain_delay_s: float = 0.0
    """How long requests are taken after SIGTERM, though not ready."""

    processor: ProcessorKind = "auto"
    collector: Collector | None = None
    """Where spans are sent, ours and the engine's; without one there are none."""
    ship_resident_items: bool = False
    encoder_cache_embeddings: int | None = None
    """How many embeddings stay on the engine's device; vLLM's number if nothing is said."""

    embedding_tier_bytes: int = 0
    """Host memory for encoder outputs; 0 for none."""

    embedding_store: EmbeddingStoreSettings = field(default_factory=EmbeddingStoreSettings)
    """Where encoder outputs are shared with other workers, if they are."""

    grammars: GrammarLimits = field(default_factory=GrammarLimits)
    """What schemas and grammars may cost."""

    tenant_turns: bool = True
    """Whether tenants take turns at the engine."""

    progress: ProgressLimits = field(default_factory=ProgressLimits)
    """When the engine counts as hung."""

    sessions: SessionSettings = field(default_factory=SessionSettings)
    """How many frontends it takes, and how often they hear from it."""

    metrics_host: str = "127.0.0.1"
    """Where the admin port is; what changes the worker answers on loopback only."""

    cell: str | None = None
    """The cell that it belongs to, if there are several."""

    @classmethod
    def of(cls, settings: WorkerSettings, engine_flags: Sequence[str]) -> Self:
        """Read the files that the settings name."""
        if (admin_key := admin_key_file(settings)) is not None:
            read_admin_key(admin_key)  # a bad one is told now, and not when the engine is loaded
        return cls(
            model=settings.model,
            listen=settings.listen,
            keys=worker_keys(settings.key_file, settings.key_dir),
            engine_flags=[*engine_flags, *(("--trust-remote-code",) if settings.trust_remote_code else ())],
            encoder_planning=settings.encoder.encoder_planning,
            admin_port=settings.admin.admin_port,
            admin_key_file=admin_key,
            drain_s=settings.drain_s,
            drain_delay_s=settings.drain_delay_s,
            processor=settings.processor,
            collector=trace_collector(settings.logs.otlp_traces_endpoint),
            ship_resident_items=settings.encoder.ship_resident_items,
            encoder_cache_embeddings=settings.encoder.encoder_cache_embeddings,
            embedding_tier_bytes=settings.encoder.embedding_tier_bytes,
            embedding_store=settings.encoder.store,
            grammars=settings.grammars,
            tenant_turns=not settings.turns.disable_tenant_turns,
            progress=settings.progress,
            sessions=settings.sessions,
            metrics_host=settings.metrics_host,
            cell=settings.cell.name,
        )


async def run_worker(options: WorkerOptions) -> None:
    """Embed an engine and serve it until SIGTERM; raises if the engine dies."""
    began = time.monotonic()
    logger.info("importing vLLM")
    from semel.engine.vllm.arguments import parse_engine_flags, take_parser_flags
    from semel.engine.vllm.compat import SOCKET_FOLDER
    from semel.engine.vllm.encoder_metrics import EncoderPage
    from semel.engine.vllm.engine import VllmEngine

    logger.info("importing vLLM took %.1f s; the engine for %s starts", time.monotonic() - began, options.model)
    check_installed(options.collector)
    page = EncoderPage.create()
    parsers, engine_flags = take_parser_flags([*options.engine_flags, *_trace_flags(options)])
    arguments = parse_engine_flags(
        options.model,
        engine_flags,
        encoder_planning=options.encoder_planning,
        ship_resident_items=options.ship_resident_items,
        encoder_cache_embeddings=options.encoder_cache_embeddings,
        embedding_tier=_tier(options),
        metrics=page.path,
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(owning())
        stack.enter_context(default_folder(SOCKET_FOLDER))  # its processes leave the sockets between them behind
        if options.collector is not None:
            stack.enter_context(default_variable(TRACES_PROTOCOL, options.collector.protocol))
            stack.enter_context(default_variable(SERVICE_NAME, _SERVICE))  # or vLLM's spans are of an unknown one
        engine = VllmEngine.start(arguments, processor=options.processor, parsers=parsers, grammars=options.grammars)
        try:
            await engine.warm()
            tune_interpreter()
            window = engine.window if options.tenant_turns else None
            async with _running(engine.log_statistics()), _keeper(options, engine) as keeper:
                admin = partial(_admin, options, engine, page, keeper)
                await serve_engine(options, engine, admin, window, keeper)
        finally:
            await engine.close()


async def serve_engine(
    options: WorkerOptions,
    engine: Engine,
    admin: Callable[[Worker, Meter], contextlib.AbstractAsyncContextManager[None]] | None = None,
    window: EngineWindow | None = None,
    keeper: Keeper | None = None,
) -> None:
    """Serve an engine that is there until SIGTERM, then let its requests end; a second one ends it at once.

    With the window of the engine tenants take turns at it; without, it gets every request when it comes. With a keeper
    encoder outputs are shared with other workers.
    """
    from semel.worker.news import News
    from semel.worker.turns import EngineTurns
    from semel.worker.worker import Worker

    async with contextlib.AsyncExitStack() as stack:
        transport = options.keys.transport
        contract = replace(engine.contract, cell=UNSET if options.cell is None else options.cell)
        listener = WorkerListener(
            options.listen, key=transport.keys, contract=contract, max_peers=options.sessions.max_frontends
        )
        await stack.enter_async_context(listener)
        meter = Meter()
        meter.watch(log_samples)
        if options.cell is not None:
            meter.set(metrics.CELL_INFO, 1, options.cell)
        await stack.enter_async_context(_running(follow_keys(transport, listener.replace_keys, meter)))
        path = memory_path(options.listen)
        borrowers = None if path is None else await stack.enter_async_context(Borrower(path))
        logger.info("the worker for %s listens at %s", engine.contract.model, listener.address)
        tracing = start_tracing(options.collector, _SERVICE, options.cell)
        stack.push_async_callback(tracing.close)
        turns, progress_s = EngineTurns(window), options.progress.engine_progress_s
        submit = None if keeper is None else keeper.submit
        worker = Worker(
            engine,
            listener,
            borrowers,
            tracing=tracing,
            turns=turns,
            progress_s=progress_s,
            submit=submit,
            news=News(options.sessions.news_s),
        )
        if options.admin_port is not None and admin is not None:
            await stack.enter_async_context(admin(worker, meter))
        stopping = ShutdownSignal.listening()
        serving = asyncio.create_task(worker.run())
        if await stopping.wait(serving):
            worker.leave()
            if options.drain_delay_s:
                delay_s = options.drain_delay_s
                logger.info("the worker is not ready any more, and takes requests for %g s (--drain-delay-s)", delay_s)
                await stopping.unless_forced(asyncio.sleep(delay_s))
            logger.info("the worker ends when its requests have, within %g s", options.drain_s)
            await stopping.unless_forced(worker.drain(options.drain_s))
            if keeper is not None:
                await stopping.unless_forced(keeper.drain(min(options.drain_s, _DRAIN_PUBLISH_S)))
            serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        if not serving.cancelled() and (error := serving.exception()) is not None:
            if isinstance(error, EngineHung):
                _exit_within(_HUNG_EXIT_S)
            raise error


@contextlib.asynccontextmanager
async def _admin(
    options: WorkerOptions, engine: VllmEngine, page: EncoderPage, keeper: Keeper | None, worker: Worker, meter: Meter
) -> AsyncIterator[None]:
    """Serve the admin address: metrics and probes, and on loopback with a key injection and reset."""
    from semel.engine.vllm.statistics import export_metrics
    from semel.web.host_check import HostCheck, allowed_hosts_at
    from semel.web.server import HttpServer
    from semel.worker.admin import AdminKey, create_admin_app

    assert options.admin_port is not None
    path = options.admin_key_file
    key = AdminKey(None if path is None else read_admin_key(path))
    if key.is_set and engine.injection_refusal:
        logger.warning("nothing can be injected: %s", engine.injection_refusal)
    lookups = CacheLookups()
    for read in (
        page.samples,
        worker.samples,
        partial(_eviction_samples, engine),
        engine.grammars.samples,
        lookups.samples,
        *(() if keeper is None else (keeper.samples,)),
    ):
        meter.watch(read)
    export_metrics(meter)

    def count(modality: Modality, hit: bool) -> None:
        lookups.count(engine.contract.model, modality, "worker", 1, hit)
        engine.count_items(1, int(hit))

    app: ASGIApp = create_admin_app(
        engine, meter, key=key, count=count, reset=worker.reset, reason=lambda: worker.reason
    )
    if hosts := allowed_hosts_at(options.metrics_host, (), has_keys=False):
        app = HostCheck(app, hosts)
    address = options.metrics_host, options.admin_port
    server = HttpServer(app, *address, port_flag="--admin-port", host_flag="--metrics-host")
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(server.running())
        await stack.enter_async_context(_running(lookups.log_lines()))
        if path is not None:
            files = ReloadedFiles("admin_key", [path], partial(read_admin_key, path), key.replace, meter)
            await stack.enter_async_context(_running(files.run()))
        yield


@contextlib.asynccontextmanager
async def _keeper(options: WorkerOptions, engine: VllmEngine) -> AsyncIterator[Keeper | None]:
    """What shares the engine's encoder outputs with other workers; None if nobody does."""
    from semel.embeddings.sealed import SealedStore
    from semel.worker.keeper import Keeper

    settings = options.embedding_store
    nodes = None if engine.tier is None else embedding_store_nodes(settings)
    if engine.tier is None or nodes is None:
        yield None
        return

    def store(identity: bytes) -> SealedStore:
        return SealedStore(options.keys.hashing, identity, nodes, settings.ttl_s)

    fetch_s, publish_after = settings.fetch_ms / 1_000, settings.publish_after
    keeper = Keeper(engine, engine.tier, store, fetch_s=fetch_s, publish_after=publish_after, ttl_s=settings.ttl_s)
    try:
        async with _running(keeper.run()):
            yield keeper
    finally:
        nodes.close()
        await keeper.close()


@contextlib.asynccontextmanager
async def _running(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Have it done beside what is inside; it ends with that."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _tier(options: WorkerOptions) -> TierConfig | None:
    """Host memory for the engine's encoder outputs, which lasts as long as this process."""
    from semel.engine.vllm.shared_file import create_file, path_of
    from semel.engine.vllm.tier_config import TierConfig
    from semel.engine.vllm.tier_page import TierPage

    if not options.embedding_tier_bytes:
        return None
    region = path_of(create_file("semel-embedding-tier"))
    if options.embedding_store.locations is None:
        return TierConfig(options.embedding_tier_bytes, region)
    page, staging = TierPage.create().path, options.embedding_store.staging_bytes
    return TierConfig(options.embedding_tier_bytes, region, page=page, staging=staging)


def _exit_within(seconds: float) -> None:
    """End this process after a while if it does not end by itself."""
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()


def _trace_flags(options: WorkerOptions) -> list[str]:
    return [] if options.collector is None else ["--otlp-traces-endpoint", options.collector.endpoint]


def _eviction_samples(engine: VllmEngine) -> Iterator[Sample]:
    yield metrics.MM_CACHE_EVICTIONS, engine.item_cache.evictions, ("worker",)
