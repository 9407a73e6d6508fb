"""What there is to see of a fleet, for metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from semel.fleet.fleet import Fleet
from semel.fleet.worker import RemoteWorker
from semel.telemetry import metrics
from semel.telemetry.meter import Sample

__all__ = ["fleet_samples"]

_STATES: Final = ("serving", "ejected", "refused", "not_connected")


def fleet_samples(fleet: Fleet, *, per_worker: bool = True) -> Iterator[Sample]:
    """The fleet's, and those of each worker: with a thousand workers and frontends there are millions of the latter."""
    for model, tokens in fleet.tokens.items():
        yield metrics.PROMPT_TOKENS, tokens.prompt, (model,)
        yield metrics.GENERATION_TOKENS, tokens.generation, (model,)
    refusals = fleet.refusals
    found = Counter("refused" if worker in refusals else _state(fleet, worker) for worker in fleet.workers)
    for state in _STATES:
        yield metrics.WORKERS, found[state], (state,)
    if not per_worker:
        return
    for worker in fleet.workers:
        yield metrics.WORKER_CONNECTED, worker.is_connected, (worker.name,)
        if worker.is_connected:
            yield metrics.LINK_KEY_GENERATION, worker.generation, (worker.name,)
        yield metrics.WORKER_EJECTED, fleet.is_ejected(worker), (worker.name,)
        yield metrics.WORKER_RUNNING, worker.load, (worker.name,)
    for worker, reason in refusals.items():
        yield metrics.WORKER_REFUSED, 1, (worker.name, reason)


def _state(fleet: Fleet, worker: RemoteWorker) -> str:
    if not worker.is_connected:
        return "not_connected"
    return "ejected" if fleet.is_ejected(worker) else "serving"
