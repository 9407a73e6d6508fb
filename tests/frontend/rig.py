"""A frontend's application over a pipeline, linked to a worker with an echo engine, all in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from semel.cache import Borrower, SharedCache
from semel.core import Contract, Key, Keyring, Modality, Submission, Target
from semel.fleet.fleet import Fleet
from semel.fleet.worker import RemoteWorker
from semel.frontend.app import create_app
from semel.frontend.routes.openapi import DocumentedApp
from semel.frontend.service import FrontendState, ServedModel
from semel.lab.testing.engine import EchoEngine, EchoStream
from semel.render import Pipeline
from semel.telemetry import CacheLookups, Meter
from semel.telemetry.request_context import traced
from semel.telemetry.spans import NO_TRACING, Tracing
from semel.wire.zmq import Backoff, FrontendLink, WorkerListener, memory_path
from semel.worker.worker import Worker
from tests.waiting import until
from tests.worker.adapting import AdaptingEngine

KEY = Key(bytes(range(32)))
MAX_IMAGES = 8
MAX_TOKENS = 4_096
CONTRACT = Contract(
    model="tiny",
    fingerprint="drawn",
    target=Target("float32"),
    fields={},
    max_items={"image": MAX_IMAGES},
    max_embeds=1_024,
    max_tokens=MAX_TOKENS,
)


@dataclass
class Rig:
    """The application, and what stands behind it."""

    app: DocumentedApp
    client: httpx.AsyncClient
    engine: EchoEngine
    worker: RemoteWorker
    pipeline: Pipeline
    meter: Meter
    service: FrontendState
    served: Worker

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        return await self.client.post(path, json=body, headers=headers)

    async def ok(self, path: str, body: dict[str, Any]) -> Any:
        """What a route answers in JSON."""
        response = await self.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    async def refused(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        """With what status and message a route refuses."""
        response = await self.post(path, body)
        assert response.status_code >= 400, response.text
        return response.status_code, response.json()["error"]["message"]

    def metrics(self, prefix: str) -> dict[str, str]:
        """The samples of all metrics whose name begins so."""
        lines = [line for line in self.meter.render().decode().splitlines() if line.startswith(prefix)]
        return {name: value for name, _, value in (line.rpartition(" ") for line in lines)}


@asynccontextmanager
async def rig(
    folder: Path,
    pipeline: Pipeline,
    *,
    engine_bytes: int = 0,
    keys: Keyring | None = None,
    memory: SharedCache | None = None,
    tracing: Tracing = NO_TRACING,
    make_engine: Callable[[Contract], EchoEngine] | None = None,
) -> AsyncIterator[Rig]:
    """The application of a frontend whose worker's engine holds so many bytes of items; counters as in production.

    What lies in its memory is lent.
    """
    address = f"ipc://{folder}/w.sock"
    engine = (make_engine or EchoEngine)(replace(CONTRACT, cache_bytes=engine_bytes))
    meter, lookups, service = Meter(), CacheLookups(), FrontendState()
    meter.watch(lookups.samples)

    def count(modality: Modality, count: int, hit: bool) -> None:
        lookups.count("tiny", modality, "processor", count, hit)

    pipeline = replace(pipeline, lookups=count, timings=traced(pipeline.timings))
    async with AsyncExitStack() as stack:
        listener = await stack.enter_async_context(WorkerListener(address, key=KEY, contract=engine.contract))
        path = memory_path(address)
        assert path is not None
        borrowers = await stack.enter_async_context(Borrower(path))
        link = FrontendLink(address, key=KEY, frontend_id="f", backoff=Backoff(first_s=0.01, max_s=0.05))
        remote = RemoteWorker(await stack.enter_async_context(link), memory=memory, lookups=lookups, meter=meter)
        adapters = engine if isinstance(engine, AdaptingEngine) else None
        worker = Worker(engine, listener, borrowers, tracing=tracing, adapters=adapters)
        tasks = [
            asyncio.create_task(worker.run()),
            asyncio.create_task(remote.run()),
        ]
        try:
            await until(lambda: remote.is_connected)
            service.begin(ServedModel(Fleet([remote]), engine.contract, pipeline))
            app = create_app(service, meter, keys, tracing=tracing)
            transport = httpx.ASGITransport(app)
            client = httpx.AsyncClient(transport=transport, base_url="http://frontend", timeout=60)
            async with client:
                yield Rig(app, client, engine, remote, pipeline, meter, service, worker)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def stalled_first_tokens() -> Iterator[None]:
    """Every answer that is submitted inside is accepted, and begins only after an hour."""
    submit = EchoEngine.submit

    async def stalled(engine: EchoEngine, submission: Submission) -> EchoStream:
        stream = await submit(engine, submission)
        stream._pause_s = 3_600.0
        return stream

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EchoEngine, "submit", stalled)
        yield
