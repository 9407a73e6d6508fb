"""The process of a worker whose engine has no model: for trying clients, frontends and fleets without any weights.

All but the engine is as in a real one: the contract, the sockets, how it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING, Final

from semel.compose.worker import serve_engine
from semel.core import Contract, Target
from semel.key_files import process_keys
from semel.lab.testing.pacing import PacedEngine
from semel.processing import find_folder
from semel.processing.probes import proven_fingerprint, run_probes
from semel.processing.processor import load_processor
from semel.settings.worker import WorkerSettings
from semel.telemetry.meter import Meter

if TYPE_CHECKING:
    from semel.worker.worker import Worker

__all__ = ["run_modelless_worker"]

_MAX_ITEMS: Final = 64
_MAX_EMBEDS: Final = 16_384
_MAX_TOKENS: Final = 32_768


async def run_modelless_worker(
    settings: WorkerSettings,
    *,
    rate: float,
    phases: int = 1,
    engine: type[PacedEngine] = PacedEngine,
    cache_bytes: int = 1 << 30,
) -> None:
    """Serve an engine that generates so many tokens a second for each request, until SIGTERM."""
    keys = process_keys(settings.key_file, settings.key_dir, "worker")
    folder, target = find_folder(settings.model), Target("float32")
    processor = await asyncio.to_thread(load_processor, settings.processor, folder, target)
    probes = await asyncio.to_thread(run_probes, processor)
    contract = Contract(
        model=settings.model,
        fingerprint=proven_fingerprint(processor.fingerprint, probes),
        target=target,
        fields={},
        max_items=dict.fromkeys(processor.modalities, _MAX_ITEMS),
        max_embeds=_MAX_EMBEDS,
        max_tokens=_MAX_TOKENS,
        cache_bytes=cache_bytes,
        probes=probes,
    )
    await serve_engine(settings, keys, engine(contract, rate=rate, phases=phases), partial(_admin, settings))


@contextlib.asynccontextmanager
async def _admin(settings: WorkerSettings, worker: Worker, meter: Meter) -> AsyncIterator[None]:
    """Serve metrics and probes; there is nothing to inject into."""
    from starlette.applications import Starlette

    from semel.web.server import HttpServer, operator_routes

    host, port = settings.metrics_host, settings.admin.admin_port
    assert port is not None
    meter.watch(worker.samples)
    app = Starlette(routes=operator_routes(meter, lambda: worker.reason))
    async with HttpServer(app, host, port, port_flag="--admin-port").running():
        yield
