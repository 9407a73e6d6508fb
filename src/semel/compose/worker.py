"""The process of a worker: an engine, served to frontends and, at the admin address, to its operator."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec import UNSET

from semel.cache import Borrower
from semel.compose.interpreter import tune_interpreter
from semel.compose.reloading import ReloadedFiles, follow_keys
from semel.core import Modality
from semel.engine.owner import owning
from semel.errors import EngineHung
from semel.fairness.turns import EngineWindow
from semel.key_files import ProcessKeys, admin_key_file, process_keys
from semel.settings.environment import (
    DEV_MODE,
    SERVICE_NAME,
    TRACES_PROTOCOL,
    default_folder,
    default_variable,
    is_dev_mode,
    trace_collector,
)
from semel.settings.secrets import embedding_store_nodes, read_admin_key
from semel.settings.worker import EncoderSettings, WorkerSettings
from semel.shutdown import ShutdownSignal
from semel.telemetry import metrics
from semel.telemetry.logs import log_samples
from semel.telemetry.lookups import CacheLookups
from semel.telemetry.meter import Meter, Sample
from semel.telemetry.tracing import Collector, check_installed, start_tracing
from semel.wire.zmq import WorkerListener, memory_path

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from semel.embeddings.settings import EmbeddingStoreSettings
    from semel.engine import Engine, EngineAdapters
    from semel.engine.vllm.engine import VllmEngine
    from semel.engine.vllm.plugins.encoder_metrics import EncoderPage
    from semel.engine.vllm.tier.config import TierConfig
    from semel.worker.embedding_sync import EmbeddingSync
    from semel.worker.worker import Worker

__all__ = ["engine_flags", "run_worker", "serve_engine"]

_SERVICE: Final = "semel-worker"
_DRAIN_PUBLISH_S: Final = 10.0
"""The most time in which a worker that ends publishes encoder outputs."""

_HUNG_EXIT_S: Final = 15.0
"""The time that a process whose engine was hung has to end: what belongs to the engine may be hung as well."""

logger = logging.getLogger(__name__)


def engine_flags(settings: WorkerSettings, flags: Sequence[str], collector: Collector | None) -> list[str]:
    """Return the flags of the embedded engine: those of the command line, and those that semel passes on to it."""
    trust = ("--trust-remote-code",) if settings.trust_remote_code else ()
    traces = () if collector is None else ("--otlp-traces-endpoint", collector.endpoint)
    return [*flags, *trust, *traces]


async def run_worker(settings: WorkerSettings, flags: Sequence[str]) -> None:
    """Embed an engine with these flags of vLLM's and serve it until SIGTERM; raises if the engine dies."""
    if (admin_key := admin_key_file(settings)) is not None:
        read_admin_key(admin_key)  # a bad one is refused now, and not when the engine is loaded
    is_dev_mode()  # likewise
    keys = process_keys(settings.key_file, settings.key_dir, "worker")
    collector = trace_collector(settings.logs.otlp_traces_endpoint)
    began = time.monotonic()
    logger.info("importing vLLM")
    from semel.engine.vllm.arguments import parse_engine_flags, take_adapter_flags, take_parser_flags
    from semel.engine.vllm.compat.internals import SOCKET_FOLDER
    from semel.engine.vllm.engine import VllmEngine
    from semel.engine.vllm.plugins.encoder_metrics import EncoderPage

    logger.info("importing vLLM took %.1f s; the engine for %s starts", time.monotonic() - began, settings.model)
    check_installed(collector)
    page = EncoderPage.create()
    parsers, rest = take_parser_flags(engine_flags(settings, flags, collector))
    modules, rest = take_adapter_flags(rest)
    encoder = settings.encoder
    arguments = parse_engine_flags(
        settings.model,
        rest,
        encoder_planning=encoder.encoder_planning,
        ship_resident_items=encoder.ship_resident_items,
        encoder_cache_embeddings=encoder.encoder_cache_embeddings,
        embedding_tier=_tier(encoder),
        metrics=page.path,
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(owning())
        stack.enter_context(default_folder(SOCKET_FOLDER))  # its processes leave the sockets between them behind
        if collector is not None:
            stack.enter_context(default_variable(TRACES_PROTOCOL, collector.protocol))
            stack.enter_context(default_variable(SERVICE_NAME, _SERVICE))  # or vLLM's spans are of an unknown one
        engine = VllmEngine.start(arguments, processor=settings.processor, parsers=parsers, grammars=settings.grammars)
        try:
            await engine.warm()
            await engine.load_adapters(modules)
            tune_interpreter()
            window = None if settings.turns.disable_tenant_turns else engine.window
            async with _running(engine.log_statistics()), _embedding_sync(encoder.store, keys, engine) as sync:
                admin = partial(_admin, settings, engine, page, sync)
                await serve_engine(settings, keys, engine, admin, window, sync, adapters=engine.adapters)
        finally:
            await engine.close()


async def serve_engine(
    settings: WorkerSettings,
    keys: ProcessKeys,
    engine: Engine,
    admin: Callable[[Worker, Meter], contextlib.AbstractAsyncContextManager[None]] | None = None,
    window: EngineWindow | None = None,
    sync: EmbeddingSync | None = None,
    stopping: ShutdownSignal | None = None,
    on_listening: Callable[[], None] = lambda: None,
    adapters: EngineAdapters | None = None,
) -> None:
    """Serve an engine that is there until SIGTERM, then let its requests end; a second one ends it at once.

    With the window of the engine tenants take turns at it; without, it gets every request when it comes. With a store
    encoder outputs are shared with other workers. With `stopping` the signal handlers of the process are left alone.
    `on_listening` is called when the address is bound, before a request is taken.
    """
    from semel.worker.cache_updates import CacheUpdates
    from semel.worker.turns import EngineTurns
    from semel.worker.worker import Worker

    async with contextlib.AsyncExitStack() as stack:
        transport, cell = keys.transport, settings.cell.name
        contract = replace(engine.contract, cell=UNSET if cell is None else cell)
        listener = WorkerListener(
            settings.listen, key=transport.keys, contract=contract, max_peers=settings.sessions.max_frontends
        )
        await stack.enter_async_context(listener)
        meter = Meter()
        meter.watch(log_samples)
        if cell is not None:
            meter.set(metrics.CELL_INFO, 1, cell)
        await stack.enter_async_context(_running(follow_keys(transport, listener.replace_keys, meter)))
        path = memory_path(settings.listen)
        borrowers = None if path is None else await stack.enter_async_context(Borrower(path))
        logger.info("the worker for %s listens at %s", engine.contract.model, listener.address)
        on_listening()
        tracing = start_tracing(trace_collector(settings.logs.otlp_traces_endpoint), _SERVICE, cell)
        stack.push_async_callback(tracing.close)
        turns, progress_s = EngineTurns(window), settings.progress.engine_progress_s
        submit = None if sync is None else sync.submit
        worker = Worker(
            engine,
            listener,
            borrowers,
            tracing=tracing,
            turns=turns,
            progress_s=progress_s,
            submit=submit,
            updates=CacheUpdates(settings.sessions.announce_interval_s),
            adapters=adapters,
        )
        if settings.admin.admin_port is not None and admin is not None:
            await stack.enter_async_context(admin(worker, meter))
        stopping = stopping or ShutdownSignal.listening()
        serving = asyncio.create_task(worker.run())
        if await stopping.wait(serving):
            worker.leave()
            if delay_s := settings.drain_delay_s:
                logger.info("the worker is not ready any more, and takes requests for %g s (--drain-delay-s)", delay_s)
                await stopping.unless_forced(asyncio.sleep(delay_s))
            logger.info("the worker ends when its requests have, within %g s", settings.drain_s)
            await stopping.unless_forced(worker.drain(settings.drain_s))
            if sync is not None:
                await stopping.unless_forced(sync.drain(min(settings.drain_s, _DRAIN_PUBLISH_S)))
            serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        if not serving.cancelled() and (error := serving.exception()) is not None:
            if isinstance(error, EngineHung):
                _exit_within(_HUNG_EXIT_S)
            raise error


@contextlib.asynccontextmanager
async def _admin(
    settings: WorkerSettings,
    engine: VllmEngine,
    page: EncoderPage,
    sync: EmbeddingSync | None,
    worker: Worker,
    meter: Meter,
) -> AsyncIterator[None]:
    """Serve the admin address: metrics and probes, and on loopback with a key injection and reset."""
    from semel.engine.vllm.statistics import export_metrics
    from semel.web.host_check import HostCheck, allowed_hosts_at
    from semel.web.server import HttpServer
    from semel.worker.admin import AdminKey, create_admin_app
    from semel.worker.control import WorkerControl

    host, port, path = settings.metrics_host, settings.admin.admin_port, admin_key_file(settings)
    assert port is not None
    key = AdminKey(None if path is None else read_admin_key(path))
    if key.is_set and engine.injection_refusal:
        logger.warning("nothing can be injected: %s", engine.injection_refusal)
    control = WorkerControl(engine.control, worker) if is_dev_mode() else None
    if control is not None:
        logger.warning("%s is set: the admin key can pause the engine and change its weights", DEV_MODE)
    lookups = CacheLookups()
    for read in (
        page.samples,
        worker.samples,
        partial(_engine_samples, engine),
        engine.grammars.samples,
        lookups.samples,
        *(() if sync is None else (sync.samples,)),
    ):
        meter.watch(read)
    export_metrics(meter)

    def count(modality: Modality, hit: bool) -> None:
        lookups.count(engine.contract.model, modality, "worker", 1, hit)
        engine.count_items(1, int(hit))

    app: ASGIApp = create_admin_app(
        engine,
        meter,
        key=key,
        count=count,
        reset=worker.reset,
        reason=lambda: worker.reason,
        control=control,
        adapters=engine.adapters,
    )
    if hosts := allowed_hosts_at(host, (), has_keys=False):
        app = HostCheck(app, hosts)
    server = HttpServer(app, host, port, port_flag="--admin-port", host_flag="--metrics-host")
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(server.running())
        await stack.enter_async_context(_running(lookups.log_lines()))
        if path is not None:
            files = ReloadedFiles("admin_key", [path], partial(read_admin_key, path), key.replace, meter)
            await stack.enter_async_context(_running(files.run()))
        yield


@contextlib.asynccontextmanager
async def _embedding_sync(
    settings: EmbeddingStoreSettings, keys: ProcessKeys, engine: VllmEngine
) -> AsyncIterator[EmbeddingSync | None]:
    """Share the engine's encoder outputs with other workers; yields None without a store."""
    from semel.embeddings.sealed import SealedStore
    from semel.worker.embedding_sync import EmbeddingSync

    nodes = None if engine.tier is None else embedding_store_nodes(settings)
    if engine.tier is None or nodes is None:
        yield None
        return

    def store(identity: bytes) -> SealedStore:
        return SealedStore(keys.hashing, identity, nodes, settings.ttl_s)

    fetch_s, publish_after = settings.fetch_ms / 1_000, settings.publish_after
    sync = EmbeddingSync(engine, engine.tier, store, fetch_s=fetch_s, publish_after=publish_after, ttl_s=settings.ttl_s)
    try:
        async with _running(sync.run()):
            yield sync
    finally:
        nodes.close()
        await sync.close()


@contextlib.asynccontextmanager
async def _running(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run it while the body runs, and cancel it then."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _tier(settings: EncoderSettings) -> TierConfig | None:
    """Host memory for the engine's encoder outputs, which lasts as long as this process."""
    from semel.engine.vllm.tier.config import TierConfig
    from semel.engine.vllm.tier.page import TierPage
    from semel.engine.vllm.tier.shared_file import create_file, descriptor_path

    if not settings.embedding_tier_bytes:
        return None
    region = descriptor_path(create_file("semel-embedding-tier"))
    if settings.store.locations is None:
        return TierConfig(settings.embedding_tier_bytes, region)
    page, staging = TierPage.create().path, settings.store.staging_bytes
    return TierConfig(settings.embedding_tier_bytes, region, page=page, staging=staging)


def _exit_within(seconds: float) -> None:
    """End this process after a while if it does not end by itself."""
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()


def _engine_samples(engine: VllmEngine) -> Iterator[Sample]:
    yield metrics.MM_CACHE_EVICTIONS, engine.item_cache.evictions, ("worker",)
    for name, state in engine.capabilities.items():
        yield metrics.CAPABILITY, 1, (name, state)
