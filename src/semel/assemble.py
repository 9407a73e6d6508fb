"""Puts the parts together into what runs: a pipeline for libraries, and the processes of a worker and of a frontend.

The only place that knows all the parts. What is decided here is who is given what, and in which order things end.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from semel.core import Contract, Feature, Key, Media, Modality, Target
from semel.errors import ConfigError
from semel.processing import HfProcessor, Pool, family_of, find_folder, read_config
from semel.render import ChatRenderer, ChatTemplate, Pipeline, Process, Tokenizer
from semel.telemetry.meter import Meter, Sample
from semel.telemetry.metrics import POOL_FAILED, POOL_PROCESSED, POOL_REPLACED, WORKER_CONNECTED, WORKER_RUNNING
from semel.wire.zmq import FrontendLink, WorkerListener

if TYPE_CHECKING:
    from semel.engine.vllm.encoder_metrics import EncoderPage
    from semel.frontend.remote import RemoteEngine
    from semel.frontend.service import Service

__all__ = ["FrontendOptions", "WorkerOptions", "assemble_pipeline", "run_frontend", "run_worker"]

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
    return Pipeline(tokenizer, renderer, process, fingerprint, key)


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What a worker process was asked for."""

    model: str
    listen: str
    key: Key
    engine_flags: Sequence[str]
    encoder_planning: bool
    metrics_port: int | None
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
        if options.metrics_port is not None:
            _serve_metrics(page, options.metrics_port)
        async with WorkerListener(options.listen, key=options.key, contract=engine.contract) as listener:
            logger.info("the worker for %s listens at %s", engine.contract.model, listener.address)
            worker = Worker(engine, listener)
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


def _serve_metrics(page: EncoderPage, port: int) -> None:
    """Serve the encoder's metrics on loopback, in a thread that ends with the process."""
    from prometheus_client import start_http_server

    meter = Meter()
    meter.watch(page.samples)
    try:
        start_http_server(port, addr="127.0.0.1", registry=meter.registry)
    except OSError as error:
        raise ConfigError(f"cannot serve metrics at 127.0.0.1:{port}: {error.strerror}; choose another port") from error


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
    worker: str
    key: Key
    host: str
    port: int
    chat_template: str | None
    processes: int
    max_body_bytes: int


async def run_frontend(options: FrontendOptions) -> None:
    """Serve OpenAI's API over HTTP until SIGTERM."""
    from semel.frontend.app import create_app
    from semel.frontend.remote import RemoteEngine
    from semel.frontend.server import HttpServer
    from semel.frontend.service import Service

    service = Service(max_body_bytes=options.max_body_bytes)
    frontend_id = f"{socket.gethostname()}-{os.getpid()}"
    meter = Meter()
    server = HttpServer(create_app(service, meter), options.host, options.port)
    async with FrontendLink(options.worker, key=options.key, frontend_id=frontend_id) as link:
        remote = RemoteEngine(link)
        meter.watch(lambda: ((WORKER_CONNECTED, remote.is_connected, ()), (WORKER_RUNNING, remote.running, ())))
        serving = asyncio.create_task(server.serve())
        linking = asyncio.create_task(remote.run())
        following = asyncio.create_task(_follow(options, service, remote, meter))
        await _until_stopped(serving, linking, following)
        service.suspend("the frontend is shutting down")
        server.stop()
        following.cancel()
        ended = await asyncio.gather(serving, following, return_exceptions=True)
        linking.cancel()
        for result in (*ended, *await asyncio.gather(linking, return_exceptions=True)):
            if isinstance(result, Exception):
                raise result


async def _follow(options: FrontendOptions, service: Service, remote: RemoteEngine, meter: Meter) -> None:
    """Serve while there is a worker whose contract we can keep, and say why not while there is none."""
    from semel.frontend.service import Serving

    folder = find_folder(options.model)
    pool: Pool | None = None
    try:
        while True:
            contract, reason = await remote.changed()
            if contract is None:
                service.suspend(reason)
                continue
            if pool is None:
                service.suspend("the model's processor is being loaded")
                pool = await Pool.start(folder, contract.target, processes=options.processes)
                meter.watch(partial(_pool_samples, pool))
                gc.freeze()  # what is loaded by now stays: a collection during a large request need not walk it
            if fault := _mismatch(contract, pool):
                logger.error("%s", fault)
                service.suspend(fault)
                continue
            process, made = pool.process, pool.description
            pipeline = _pipeline(
                folder, process, made.fingerprint, made.placeholders, options.key, options.chat_template
            )
            service.begin(Serving(contract.model, remote, pipeline))
            logger.info("serving %s", contract.model)
    finally:
        if pool is not None:
            await pool.close()


def _pool_samples(pool: Pool) -> Iterator[Sample]:
    yield POOL_PROCESSED, pool.processed, ()
    yield POOL_FAILED, pool.failed, ()
    yield POOL_REPLACED, pool.replaced, ()


def _mismatch(contract: Contract, pool: Pool) -> str | None:
    ours = pool.description.fingerprint
    if contract.fingerprint == ours:
        return None
    return (
        f"the worker's processor ({contract.fingerprint[:12]}) is not ours ({ours[:12]}): start both with the same "
        "model folder and the same versions of transformers, torch and pillow"
    )
