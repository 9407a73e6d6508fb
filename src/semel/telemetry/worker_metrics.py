"""The metrics of a worker: its encoder, its engine, what waits for them."""

from __future__ import annotations

from typing import Final

from semel.telemetry.metric import Metric

__all__ = [
    "DESK_BYTES",
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
    "ENGINE_SEQUENCES",
    "ENGINE_STEPS",
    "ENGINE_WAITED_SECONDS",
    "ENGINE_WAITING",
    "FRONTEND_SESSIONS",
    "GRAMMARS",
    "GRAMMARS_WAITING",
    "GRAMMAR_ABANDONED",
    "GRAMMAR_ENDED",
    "GRAMMAR_FOLLOWING_SECONDS",
    "NEEDS",
    "RESUBMISSIONS",
    "SESSIONS_REFUSED",
]

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
ENCODER_LEFT_OUT_BYTES: Final = Metric(
    "semel_encoder_left_out_bytes_total",
    "counter",
    "Bytes of items that stayed behind when their request went to the engine's worker processes.",
    _ENGINE,
)
ENCODER_LATE_BYTES: Final = Metric(
    "semel_encoder_late_bytes_total",
    "counter",
    "Bytes of items that had stayed behind, and were sent with the step that encodes them.",
    _ENGINE,
)
ENCODER_NOT_FINITE: Final = Metric(
    "semel_encoder_not_finite_total",
    "counter",
    "Encoder outputs with NaN or infinity in them: the model, its weights or its dtype overflow.",
    _ENGINE,
)
ENCODER_REJECTED: Final = Metric(
    "semel_encoder_rejected_total",
    "counter",
    "Requests that were ended because the encoder's output did not fit their item, or the encoder failed on it.",
    _ENGINE,
)

DESK_BYTES: Final = Metric(
    "semel_desk_bytes", "gauge", "Bytes of features that a worker keeps for requests on their way into the engine."
)
FRONTEND_SESSIONS: Final = Metric(
    "semel_frontend_sessions",
    "gauge",
    "Links from frontends, by the generation of transport keys that they were opened with; 0 for those of a fleet key.",
    ("generation",),
)
SESSIONS_REFUSED: Final = Metric(
    "semel_sessions_refused_total", "counter", "Frontends that got no session, by the code of the reason.", ("code",)
)
NEEDS: Final = Metric("semel_needs_total", "counter", "Features that a worker asked a frontend for.")
RESUBMISSIONS: Final = Metric(
    "semel_resubmissions_total", "counter", "Requests that went into the engine again, because it had lost an item."
)
ENGINE_STEPS: Final = Metric("semel_engine_steps_total", "counter", "Steps that the engine has made.")
ENGINE_WAITED_SECONDS: Final = Metric(
    "semel_engine_waited_seconds",
    "gauge",
    "Seconds without a step of the engine while a request is under way; see `--engine-progress-s`.",
)
GRAMMARS: Final = Metric(
    "semel_grammars_total",
    "counter",
    "Schemas and grammars of requests, by outcome: remembered, compiled, refused, too_large, too_slow, failed, busy.",
    ("outcome",),
)
GRAMMAR_FOLLOWING_SECONDS: Final = Metric(
    "semel_grammar_following_seconds_total",
    "counter",
    "CPU seconds that the engine core spent on finding the tokens that grammars allow.",
    _ENGINE,
)
GRAMMAR_ENDED: Final = Metric(
    "semel_grammar_ended_total",
    "counter",
    "Requests that were ended because their grammar took too much CPU time in the engine core.",
    _ENGINE,
)
GRAMMAR_ABANDONED: Final = Metric(
    "semel_grammar_abandoned_threads",
    "gauge",
    "Threads of the engine core that still follow a grammar whose request was ended.",
    _ENGINE,
)
GRAMMARS_WAITING: Final = Metric(
    "semel_grammars_waiting", "gauge", "Schemas and grammars that a worker compiles on trial, or that wait for it."
)
ENGINE_SEQUENCES: Final = Metric("semel_engine_sequences", "gauge", "Sequences that the engine runs or is to run next.")
ENGINE_WAITING: Final = Metric(
    "semel_engine_waiting_requests", "gauge", "Requests that wait at a worker for their tenant's turn at the engine."
)
