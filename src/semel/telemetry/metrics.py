"""The table of all metrics. A metric that is not in it cannot be recorded; the docs are generated from it.

Those of workers, embeddings, media and connections have modules of their own; everybody imports them from here.
"""

from __future__ import annotations

from typing import Final

from semel.telemetry import connection_metrics, embedding_metrics, media_metrics, worker_metrics
from semel.telemetry.connection_metrics import (
    CELL_INFO,
    CONNECTIONS,
    CONNECTIONS_CLOSED,
    CONNECTIONS_LIMIT,
    FILE_RELOADS,
    FILE_STALE,
)
from semel.telemetry.embedding_metrics import (
    EMBEDDING_BYTES,
    EMBEDDING_CAPACITY,
    EMBEDDING_EVICTIONS,
    EMBEDDING_FETCHES,
    EMBEDDING_LOAD_BYTES,
    EMBEDDING_LOAD_SECONDS,
    EMBEDDING_LOADS,
    EMBEDDING_NOT_PUBLISHED,
    EMBEDDING_NOT_SAVED,
    EMBEDDING_PINNED,
    EMBEDDING_PUBLISHED,
    EMBEDDING_SAVE_BYTES,
    EMBEDDING_SAVE_SECONDS,
    EMBEDDING_SAVES,
    EMBEDDING_STORE_CALLS,
    EMBEDDING_STORE_SECONDS,
    EMBEDDING_STORE_UP,
)
from semel.telemetry.media_metrics import (
    MEDIA_CACHE_BYTES,
    MEDIA_CACHE_CONFIRMED,
    MEDIA_CACHE_HITS,
    MEDIA_CACHE_QUERIES,
    MEDIA_FETCH_SECONDS,
    MEDIA_FETCHED_BYTES,
    MEDIA_FETCHES,
    MEDIA_FETCHES_JOINED,
    MEDIA_STORE_BYTES,
    MEDIA_STORE_CAPACITY,
    MEDIA_STORE_ERRORS,
    MEDIA_STORE_EVICTIONS,
    MEDIA_STORE_EXPIRATIONS,
    MEDIA_STORE_FILES,
    MEDIA_STORE_HITS,
    MEDIA_STORE_QUERIES,
)
from semel.telemetry.metric import Metric
from semel.telemetry.worker_metrics import (
    DESK_BYTES,
    ENCODER_CACHE_CAPACITY,
    ENCODER_CACHE_EVICTIONS,
    ENCODER_CACHE_HITS,
    ENCODER_CACHE_QUERIES,
    ENCODER_CACHE_RECLAIMABLE,
    ENCODER_CACHE_RESIDENT,
    ENCODER_CUT,
    ENCODER_LATE_BYTES,
    ENCODER_LEFT_OUT_BYTES,
    ENCODER_NOT_FINITE,
    ENCODER_PLANNED,
    ENCODER_PLANNING_SECONDS,
    ENCODER_REJECTED,
    ENCODER_TAKEN_OVER,
    ENGINE_SEQUENCES,
    ENGINE_STEPS,
    ENGINE_WAITED_SECONDS,
    ENGINE_WAITING,
    FRONTEND_SESSIONS,
    GRAMMAR_ABANDONED,
    GRAMMAR_ENDED,
    GRAMMAR_FOLLOWING_SECONDS,
    GRAMMARS,
    GRAMMARS_WAITING,
    NEEDS,
    RESUBMISSIONS,
    SESSIONS_REFUSED,
)

__all__ = [
    "CELL_INFO",
    "CONNECTIONS",
    "CONNECTIONS_CLOSED",
    "CONNECTIONS_LIMIT",
    "DESK_BYTES",
    "EMBEDDING_BYTES",
    "EMBEDDING_CAPACITY",
    "EMBEDDING_EVICTIONS",
    "EMBEDDING_FETCHES",
    "EMBEDDING_LOADS",
    "EMBEDDING_LOAD_BYTES",
    "EMBEDDING_LOAD_SECONDS",
    "EMBEDDING_NOT_PUBLISHED",
    "EMBEDDING_NOT_SAVED",
    "EMBEDDING_PINNED",
    "EMBEDDING_PUBLISHED",
    "EMBEDDING_SAVES",
    "EMBEDDING_SAVE_BYTES",
    "EMBEDDING_SAVE_SECONDS",
    "EMBEDDING_STORE_CALLS",
    "EMBEDDING_STORE_SECONDS",
    "EMBEDDING_STORE_UP",
    "ENCODER_CACHE_CAPACITY",
    "ENCODER_CACHE_EVICTIONS",
    "ENCODER_CACHE_HITS",
    "ENCODER_CACHE_QUERIES",
    "ENCODER_CACHE_RECLAIMABLE",
    "ENCODER_CACHE_RESIDENT",
    "ENCODER_CUT",
    "ENCODER_LATE_BYTES",
    "ENCODER_LEFT_OUT_BYTES",
    "ENCODER_NOT_FINITE",
    "ENCODER_PLANNED",
    "ENCODER_PLANNING_SECONDS",
    "ENCODER_REJECTED",
    "ENCODER_TAKEN_OVER",
    "ENGINES_LOST",
    "ENGINE_SEQUENCES",
    "ENGINE_STEPS",
    "ENGINE_WAITED_SECONDS",
    "ENGINE_WAITING",
    "FAILOVERS",
    "FEATURES_REPAIRED",
    "FEATURES_SENT",
    "FEATURE_BYTES_SAVED",
    "FEATURE_BYTES_SENT",
    "FILE_RELOADS",
    "FILE_STALE",
    "FLIGHTS_JOINED",
    "FRONTEND_SESSIONS",
    "GENERATION_TOKENS",
    "GRAMMARS",
    "GRAMMARS_WAITING",
    "GRAMMAR_ABANDONED",
    "GRAMMAR_ENDED",
    "GRAMMAR_FOLLOWING_SECONDS",
    "IGNORED_FIELDS",
    "LEASES",
    "LINK_KEY_GENERATION",
    "LOG_LINES_DROPPED",
    "LOOP_LAG_SECONDS",
    "MEDIA_CACHE_BYTES",
    "MEDIA_CACHE_CONFIRMED",
    "MEDIA_CACHE_HITS",
    "MEDIA_CACHE_QUERIES",
    "MEDIA_FETCHED_BYTES",
    "MEDIA_FETCHES",
    "MEDIA_FETCHES_JOINED",
    "MEDIA_FETCH_SECONDS",
    "MEDIA_IN_FLIGHT",
    "MEDIA_IN_FLIGHT_LIMIT",
    "MEDIA_STORE_BYTES",
    "MEDIA_STORE_CAPACITY",
    "MEDIA_STORE_ERRORS",
    "MEDIA_STORE_EVICTIONS",
    "MEDIA_STORE_EXPIRATIONS",
    "MEDIA_STORE_FILES",
    "MEDIA_STORE_HITS",
    "MEDIA_STORE_QUERIES",
    "METRICS",
    "MM_CACHE_BYTES",
    "MM_CACHE_CAPACITY",
    "MM_CACHE_EVICTIONS",
    "MM_CACHE_HITS",
    "MM_CACHE_ITEMS",
    "MM_CACHE_QUERIES",
    "NEEDS",
    "POOL_ASSEMBLED",
    "POOL_BUSY",
    "POOL_DECODED",
    "POOL_FAILED",
    "POOL_PROCESSED",
    "POOL_PROCESSES",
    "POOL_REPLACED",
    "POOL_WAITING",
    "PROMPT_TOKENS",
    "REFUSALS",
    "REQUESTS",
    "REQUESTS_CALLED_BACK",
    "REQUESTS_IN_FLIGHT",
    "REQUESTS_WAITING",
    "RESUBMISSIONS",
    "SESSIONS_REFUSED",
    "SPANS_DROPPED",
    "STAGE_SECONDS",
    "TENANT_MEDIA_IN_FLIGHT",
    "TENANT_REQUESTS_CALLED_BACK",
    "TENANT_REQUESTS_WAITING",
    "VLLM_MM_CACHE_HITS",
    "VLLM_MM_CACHE_QUERIES",
    "WORKERS",
    "WORKER_CONNECTED",
    "WORKER_EJECTED",
    "WORKER_EJECTIONS",
    "WORKER_REFUSED",
    "WORKER_RUNNING",
    "Metric",
]

# Features in all caches. Tier `processor` is a frontend's feature cache, tier `worker` the engine's item cache.
_TIER: Final = ("tier",)
MM_CACHE_QUERIES: Final = Metric(
    "semel_mm_cache_queries_total",
    "counter",
    "Items that were looked up: one query per item, request and tier.",
    ("model", "modality", "tier"),
)
MM_CACHE_HITS: Final = Metric(
    "semel_mm_cache_hits_total",
    "counter",
    "Items for which no processing was started (processor), or no payload travelled (worker).",
    ("model", "modality", "tier"),
)
VLLM_MM_CACHE_QUERIES: Final = Metric(
    "vllm:mm_cache_queries_total", "counter", "The queries of the processor tier under vLLM's name.", ("model_name",)
)
VLLM_MM_CACHE_HITS: Final = Metric(
    "vllm:mm_cache_hits_total", "counter", "The hits of the processor tier under vLLM's name.", ("model_name",)
)
MM_CACHE_BYTES: Final = Metric("semel_mm_cache_bytes", "gauge", "Bytes of features that a cache holds.", _TIER)
MM_CACHE_CAPACITY: Final = Metric("semel_mm_cache_capacity_bytes", "gauge", "Bytes that a cache may hold.", _TIER)
MM_CACHE_ITEMS: Final = Metric("semel_mm_cache_items", "gauge", "Features that a cache holds.", _TIER)
MM_CACHE_EVICTIONS: Final = Metric("semel_mm_cache_evictions_total", "counter", "Features that were given up.", _TIER)
FLIGHTS_JOINED: Final = Metric(
    "semel_flights_joined_total", "counter", "Items that waited for processing which was under way already."
)
FEATURES_SENT: Final = Metric(
    "semel_features_sent_total", "counter", "Features that were sent to workers, in frames or by memory.", ("way",)
)
FEATURE_BYTES_SENT: Final = Metric(
    "semel_feature_sent_bytes_total", "counter", "Their bytes; those by memory passed through no socket.", ("way",)
)
FEATURE_BYTES_SAVED: Final = Metric(
    "semel_feature_saved_bytes_total", "counter", "Bytes of features that were named instead of sent."
)
FEATURES_REPAIRED: Final = Metric(
    "semel_features_repaired_total", "counter", "Features that a worker turned out to lack, and asked for."
)
LEASES: Final = Metric("semel_leases", "gauge", "Features in shared memory that workers are reading.")
# Frontends.
REQUESTS: Final = Metric(
    "semel_requests_total", "counter", "Requests that were answered, by route and HTTP status.", ("route", "status")
)
PROMPT_TOKENS: Final = Metric(
    "semel_prompt_tokens_total", "counter", "Tokens of prompts that workers have taken, items included.", ("model",)
)
GENERATION_TOKENS: Final = Metric(
    "semel_generation_tokens_total", "counter", "Tokens of answers that came from workers.", ("model",)
)
_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
STAGE_SECONDS: Final = Metric(
    "semel_stage_seconds",
    "histogram",
    "Time that a request spent in one stage of its way: parse, fetch, digest, layout, process, render, send, "
    "first_token (of a whole answer: all of it).",
    ("stage",),
    _SECONDS,
)
LOOP_LAG_SECONDS: Final = Metric(
    "semel_event_loop_lag_seconds",
    "histogram",
    "How late a frontend's event loop comes to what is due: looked at every 50 ms.",
    (),
    (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5),
)
LOG_LINES_DROPPED: Final = Metric(
    "semel_log_lines_dropped_total", "counter", "Log lines that were dropped, because nobody read the log fast enough."
)
REFUSALS: Final = Metric(
    "semel_refusals_total", "counter", "Requests that were refused, by the code of their error.", ("code",)
)
IGNORED_FIELDS: Final = Metric(
    "semel_ignored_fields_total",
    "counter",
    "Unknown top-level fields of requests that were ignored, by route (--unknown-fields).",
    ("route",),
)
REQUESTS_IN_FLIGHT: Final = Metric(
    "semel_requests_in_flight", "gauge", "Requests that are being read or answered, streams included (--max-requests)."
)
REQUESTS_WAITING: Final = Metric(
    "semel_requests_waiting", "gauge", "Requests that wait for their answer to begin (--max-waiting-requests)."
)
MEDIA_IN_FLIGHT: Final = Metric(
    "semel_media_in_flight_bytes", "gauge", "Bytes of bodies and media that requests hold until they are answered."
)
MEDIA_IN_FLIGHT_LIMIT: Final = Metric(
    "semel_media_in_flight_limit_bytes", "gauge", "The most that they may hold (--max-media-bytes-in-flight)."
)
REQUESTS_CALLED_BACK: Final = Metric(
    "semel_requests_called_back_total",
    "counter",
    "Requests that were ended because their tenant had more than its share while another asked, by the code of their "
    "error.",
    ("code",),
)
_TENANT: Final = ("tenant",)
TENANT_MEDIA_IN_FLIGHT: Final = Metric(
    "semel_tenant_media_in_flight_bytes", "gauge", "The same bytes, by tenant (--metrics-per-tenant).", _TENANT
)
TENANT_REQUESTS_WAITING: Final = Metric(
    "semel_tenant_requests_waiting",
    "gauge",
    "Requests that wait for their answer to begin, by tenant (--metrics-per-tenant).",
    _TENANT,
)
TENANT_REQUESTS_CALLED_BACK: Final = Metric(
    "semel_tenant_requests_called_back_total",
    "counter",
    "Requests that were called back, by tenant (--metrics-per-tenant).",
    _TENANT,
)
POOL_ASSEMBLED: Final = Metric("semel_pool_assembled_total", "counter", "Prompts that the model's processor assembled.")
POOL_DECODED: Final = Metric("semel_pool_decoded_total", "counter", "Media that were given to a process to decode.")
POOL_PROCESSED: Final = Metric("semel_pool_processed_total", "counter", "Items that were preprocessed.")
POOL_FAILED: Final = Metric("semel_pool_failed_total", "counter", "Items whose preprocessing ended in an error.")
POOL_REPLACED: Final = Metric(
    "semel_pool_replaced_total", "counter", "Preprocessing processes that took the place of one that had ended."
)
POOL_WAITING: Final = Metric("semel_pool_waiting", "gauge", "Items and prompts that wait for a preprocessing process.")
POOL_BUSY: Final = Metric("semel_pool_busy", "gauge", "Preprocessing processes that work on an item.")
POOL_PROCESSES: Final = Metric(
    "semel_pool_processes",
    "gauge",
    "Preprocessing processes that are loaded, without the spare ones (--preprocessing-processes).",
)
POOL_SANDBOXED: Final = Metric(
    "semel_pool_sandboxed",
    "gauge",
    "Preprocessing processes that have this layer of the sandbox around them, without the spare ones.",
    ("layer",),
)
WORKERS: Final = Metric(
    "semel_workers", "gauge", "Workers by state: serving, ejected, refused, not_connected.", ("state",)
)
WORKER_CONNECTED: Final = Metric(
    "semel_worker_connected", "gauge", "1 while the worker is connected, else 0.", ("worker",)
)
LINK_KEY_GENERATION: Final = Metric(
    "semel_link_key_generation",
    "gauge",
    "The generation of transport keys that the link to the worker was opened with; 0 for those of a fleet key.",
    ("worker",),
)
WORKER_EJECTED: Final = Metric(
    "semel_worker_ejected",
    "gauge",
    "1 while the worker gets no requests but trials, because it failed others (--eject-after-failures), else 0.",
    ("worker",),
)
WORKER_REFUSED: Final = Metric(
    "semel_worker_refused",
    "gauge",
    "1 while the worker is not used because it differs from the fleet or this frontend; the log says in what.",
    ("worker", "reason"),
)
WORKER_EJECTIONS: Final = Metric(
    "semel_worker_ejections_total", "counter", "Times that a worker was ejected because it failed requests."
)
FAILOVERS: Final = Metric(
    "semel_failovers_total",
    "counter",
    "Requests that went to another worker because theirs failed or was lost, by the code of the error.",
    ("code",),
)
ENGINES_LOST: Final = Metric(
    "semel_engines_lost_total",
    "counter",
    "Engines that ended while a frontend was connected to their worker, by code: engine_dead, engine_hung, or gone and "
    "silence if the worker could not say more.",
    ("code",),
)
WORKER_RUNNING: Final = Metric(
    "semel_worker_running_requests",
    "gauge",
    "Requests that the worker's engine is answering, of all frontends.",
    ("worker",),
)

# Any process with tracing.
SPANS_DROPPED: Final = Metric(
    "semel_spans_dropped_total",
    "counter",
    "Spans that no collector got (--otlp-traces-endpoint), by the reason: queue_full or not_delivered.",
    ("reason",),
)

METRICS: Final = tuple(
    dict.fromkeys(
        value
        for names in (
            vars(worker_metrics),
            vars(embedding_metrics),
            vars(media_metrics),
            vars(connection_metrics),
            dict(globals()),
        )
        for value in names.values()
        if isinstance(value, Metric)
    )
)
"""Every metric of semel, in the order of the documentation."""
