"""The table of all metrics. A metric that is not in it cannot be recorded, and the docs are made from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

__all__ = [
    "ENCODER_CACHE_CAPACITY",
    "ENCODER_CACHE_EVICTIONS",
    "ENCODER_CACHE_HITS",
    "ENCODER_CACHE_QUERIES",
    "ENCODER_CACHE_RECLAIMABLE",
    "ENCODER_CACHE_RESIDENT",
    "ENCODER_CUT",
    "ENCODER_PLANNED",
    "ENCODER_PLANNING_SECONDS",
    "ENCODER_TAKEN_OVER",
    "METRICS",
    "POOL_FAILED",
    "POOL_PROCESSED",
    "POOL_REPLACED",
    "REQUESTS",
    "WORKER_CONNECTED",
    "WORKER_RUNNING",
    "Metric",
]


@dataclass(frozen=True, slots=True)
class Metric:
    """A number that semel exports. The name of a counter ends in `_total`, and every name carries its unit."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    labels: tuple[str, ...] = ()


# The encoder, from inside the engine core. `engine` is the engine core's rank.
_ENGINE: Final = ("engine",)
ENCODER_CACHE_QUERIES: Final = Metric(
    "semel_encoder_cache_queries_total", "counter", "Inputs that a request began to refer to.", _ENGINE
)
ENCODER_CACHE_HITS: Final = Metric(
    "semel_encoder_cache_hits_total",
    "counter",
    "Inputs whose encoder output was there, or was planned for another input of the same step.",
    _ENGINE,
)
ENCODER_CACHE_EVICTIONS: Final = Metric(
    "semel_encoder_cache_evictions_total", "counter", "Encoder outputs that were given up.", _ENGINE
)
ENCODER_CACHE_CAPACITY: Final = Metric(
    "semel_encoder_cache_capacity_embeddings", "gauge", "Embeddings that the encoder cache can hold.", _ENGINE
)
ENCODER_CACHE_RESIDENT: Final = Metric(
    "semel_encoder_cache_resident_embeddings", "gauge", "Embeddings in the encoder cache.", _ENGINE
)
ENCODER_CACHE_RECLAIMABLE: Final = Metric(
    "semel_encoder_cache_reclaimable_embeddings",
    "gauge",
    "Embeddings in the encoder cache that no request refers to.",
    _ENGINE,
)
ENCODER_PLANNED: Final = Metric(
    "semel_encoder_planned_total", "counter", "Encoder outputs that were planned, to be encoded or loaded.", _ENGINE
)
ENCODER_CUT: Final = Metric(
    "semel_encoder_cut_total", "counter", "Times that an input which did not fit cut a request's tokens.", _ENGINE
)
ENCODER_TAKEN_OVER: Final = Metric(
    "semel_encoder_taken_over_total",
    "counter",
    "Encodes that passed to another request, because theirs was preempted in the step that planned them.",
    _ENGINE,
)
ENCODER_PLANNING_SECONDS: Final = Metric(
    "semel_encoder_planning_seconds_total", "counter", "Time spent planning the encoder.", _ENGINE
)

# A frontend.
REQUESTS: Final = Metric(
    "semel_requests_total", "counter", "Requests that were answered, by route and HTTP status.", ("route", "status")
)
POOL_PROCESSED: Final = Metric("semel_pool_processed_total", "counter", "Items that were preprocessed.")
POOL_FAILED: Final = Metric("semel_pool_failed_total", "counter", "Items whose preprocessing ended in an error.")
POOL_REPLACED: Final = Metric(
    "semel_pool_replaced_total", "counter", "Preprocessing processes that took the place of one that had ended."
)
WORKER_CONNECTED: Final = Metric("semel_worker_connected", "gauge", "1 while the worker is connected, else 0.")
WORKER_RUNNING: Final = Metric(
    "semel_worker_running_requests", "gauge", "Requests that the worker's engine is answering, of all frontends."
)

METRICS: Final = (
    ENCODER_CACHE_QUERIES,
    ENCODER_CACHE_HITS,
    ENCODER_CACHE_EVICTIONS,
    ENCODER_CACHE_CAPACITY,
    ENCODER_CACHE_RESIDENT,
    ENCODER_CACHE_RECLAIMABLE,
    ENCODER_PLANNED,
    ENCODER_CUT,
    ENCODER_TAKEN_OVER,
    ENCODER_PLANNING_SECONDS,
    REQUESTS,
    POOL_PROCESSED,
    POOL_FAILED,
    POOL_REPLACED,
    WORKER_CONNECTED,
    WORKER_RUNNING,
)
"""Every metric of semel, in the order in which they are documented."""
