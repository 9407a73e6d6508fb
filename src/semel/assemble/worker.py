"""The process of a worker: an engine, served to frontends and, at the admin address, to its operator."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from semel.assemble.stopping import until_stopped
from semel.cache import Borrowers
from semel.core import Key, Modality
from semel.processing.processor import ProcessorKind
from semel.settings import default_folder
from semel.telemetry.lookups import CacheLookups
from semel.telemetry.meter import Meter, Sample
from semel.telemetry.metrics import MM_CACHE_EVICTIONS
from semel.wire.zmq import WorkerListener, memory_path

if TYPE_CHECKING:
    from semel.engine.vllm.encoder_metrics import EncoderPage
    from semel.engine.vllm.engine import VllmEngine
    from semel.worker.worker import Worker

__all__ = ["WorkerOptions", "run_worker"]

logger = logging.getLogger(__name__)


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
    from semel.engine.vllm.arguments import parse_engine_flags, take_parser_flags
    from semel.engine.vllm.compat import SOCKET_FOLDER
    from semel.engine.vllm.encoder_metrics import EncoderPage
    from semel.engine.vllm.engine import VllmEngine

    page = EncoderPage.create()
    parsers, engine_flags = take_parser_flags(options.engine_flags)
    arguments = parse_engine_flags(
        options.model, engine_flags, encoder_planning=options.encoder_planning, metrics=page.path
    )
    with default_folder(SOCKET_FOLDER):  # the engine's processes leave the sockets between them behind
        engine = VllmEngine.start(arguments, processor=options.processor, parsers=parsers)
        try:
            await _serve_engine(options, engine, page)
        finally:
            await engine.close()


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
        await until_stopped(serving)
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
    async with HttpServer(app, "127.0.0.1", options.admin_port).running():
        yield


def _eviction_samples(engine: VllmEngine) -> Iterator[Sample]:
    yield MM_CACHE_EVICTIONS, engine.item_cache.evictions, ("worker",)
