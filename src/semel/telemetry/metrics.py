"""The table of all metrics. Each is declared here, once; the docs are generated from it.

Users import the module, and name a metric as `metrics.REQUESTS`.
"""

from __future__ import annotations

from typing import Final

from semel.telemetry.meter import Metric

# The encoder, from inside the engine core. `engine` is the engine core's rank.
_ENGINE: Final = ("engine",)
ENCODER_CACHE_QUERIES: Final = Metric(
    "semel_encoder_cache_queries_total", "Inputs that a request began to refer to.", _ENGINE
)
ENCODER_CACHE_HITS: Final = Metric(
    "semel_encoder_cache_hits_total",
    "Inputs whose encoder output was there, or was planned for another input of the same step.",
    _ENGINE,
)
ENCODER_CACHE_EVICTIONS: Final = Metric(
    "semel_encoder_cache_evictions_total", "Encoder outputs that were given up.", _ENGINE
)
ENCODER_CACHE_CAPACITY: Final = Metric(
    "semel_encoder_cache_capacity_embeddings", "Embeddings that the encoder cache can hold.", _ENGINE
)
ENCODER_CACHE_RESIDENT: Final = Metric(
    "semel_encoder_cache_resident_embeddings", "Embeddings in the encoder cache.", _ENGINE
)
ENCODER_CACHE_RECLAIMABLE: Final = Metric(
    "semel_encoder_cache_reclaimable_embeddings", "Embeddings in the encoder cache that no request refers to.", _ENGINE
)
ENCODER_PLANNED: Final = Metric(
    "semel_encoder_planned_total", "Encoder outputs that were planned, to be encoded or loaded.", _ENGINE
)
ENCODER_CUT: Final = Metric(
    "semel_encoder_cut_total", "Times that an input which did not fit cut a request's tokens.", _ENGINE
)
ENCODER_TAKEN_OVER: Final = Metric(
    "semel_encoder_taken_over_total",
    "Encodes that passed to another request, because theirs was preempted in the step that planned them.",
    _ENGINE,
)
ENCODER_PLANNING_SECONDS: Final = Metric(
    "semel_encoder_planning_seconds_total", "Time spent planning the encoder.", _ENGINE
)
ENCODER_LEFT_OUT_BYTES: Final = Metric(
    "semel_encoder_left_out_bytes_total",
    "Bytes of items that stayed behind when their request went to the engine's worker processes.",
    _ENGINE,
)
ENCODER_LATE_BYTES: Final = Metric(
    "semel_encoder_late_bytes_total",
    "Bytes of items that had stayed behind, and were sent with the step that encodes them.",
    _ENGINE,
)
ENCODER_NOT_FINITE: Final = Metric(
    "semel_encoder_not_finite_total",
    "Encoder outputs with NaN or infinity in them: the model, its weights or its dtype overflow.",
    _ENGINE,
)
ENCODER_REJECTED: Final = Metric(
    "semel_encoder_rejected_total",
    "Requests that were ended because the encoder's output did not fit their item, or the encoder failed on it.",
    _ENGINE,
)

CAPABILITY: Final = Metric(
    "semel_capability",
    "1 for the state of each part that a worker tries at its start: proven, off (it failed, and is not used), untested "
    "or absent.",
    ("name", "state"),
)
INTAKE_BYTES: Final = Metric(
    "semel_intake_bytes", "Bytes of features that a worker keeps for requests on their way into the engine."
)
FRONTEND_SESSIONS: Final = Metric(
    "semel_frontend_sessions",
    "Links from frontends, by the generation of transport keys that they were opened with; 0 for those of a fleet key.",
    ("generation",),
)
SESSIONS_REFUSED: Final = Metric(
    "semel_sessions_refused_total", "Frontends that got no session, by the code of the reason.", ("code",)
)
NEEDS: Final = Metric("semel_needs_total", "Features that a worker asked a frontend for.")
RESUBMISSIONS: Final = Metric(
    "semel_resubmissions_total", "Requests that went into the engine again, because it had lost an item."
)
ENGINE_STEPS: Final = Metric("semel_engine_steps_total", "Steps that the engine has made.")
ENGINE_PAUSED: Final = Metric("semel_engine_paused", "1 while an operator has paused the engine or put it to sleep.")
ENGINE_WAITED_SECONDS: Final = Metric(
    "semel_engine_waited_seconds",
    "Seconds without a step of the engine while a request is under way; see `--engine-progress-s`.",
)
GRAMMARS: Final = Metric(
    "semel_grammars_total",
    "Schemas and grammars of requests, by outcome: remembered, compiled, refused, too_large, too_slow, failed, busy.",
    ("outcome",),
)
GRAMMAR_FOLLOWING_SECONDS: Final = Metric(
    "semel_grammar_following_seconds_total",
    "CPU seconds that the engine core spent on finding the tokens that grammars allow.",
    _ENGINE,
)
GRAMMAR_ENDED: Final = Metric(
    "semel_grammar_ended_total",
    "Requests that were ended because their grammar took too much CPU time in the engine core.",
    _ENGINE,
)
GRAMMAR_ABANDONED: Final = Metric(
    "semel_grammar_abandoned_threads",
    "Threads of the engine core that still follow a grammar whose request was ended.",
    _ENGINE,
)
GRAMMARS_WAITING: Final = Metric(
    "semel_grammars_waiting", "Schemas and grammars that a worker compiles on trial, or that wait for it."
)
ENGINE_SEQUENCES: Final = Metric("semel_engine_sequences", "Sequences that the engine runs or is to run next.")
ENGINE_WAITING: Final = Metric(
    "semel_engine_waiting_requests", "Requests that wait at a worker for their tenant's turn at the engine."
)

# Encoder outputs next to the device: in the memory of the host and in the fleet's store.
_ENGINE_TIER: Final = ("engine", "tier")
EMBEDDING_LOADS: Final = Metric(
    "semel_embedding_loads_total", "Encoder outputs that were loaded instead of encoded.", _ENGINE_TIER
)
EMBEDDING_LOAD_BYTES: Final = Metric(
    "semel_embedding_load_bytes_total", "Bytes of encoder outputs that were loaded.", _ENGINE_TIER
)
EMBEDDING_LOAD_SECONDS: Final = Metric(
    "semel_embedding_load_seconds_total", "Time spent loading encoder outputs.", _ENGINE_TIER
)
EMBEDDING_SAVES: Final = Metric(
    "semel_embedding_saves_total", "Encoder outputs that were copied to the host's memory.", _ENGINE
)
EMBEDDING_SAVE_BYTES: Final = Metric(
    "semel_embedding_save_bytes_total", "Bytes of encoder outputs that were copied there.", _ENGINE
)
EMBEDDING_SAVE_SECONDS: Final = Metric(
    "semel_embedding_save_seconds_total", "Time spent copying encoder outputs there.", _ENGINE
)
EMBEDDING_NOT_SAVED: Final = Metric(
    "semel_embedding_not_saved_total",
    "Encoder outputs that were not copied there: no room, or the encoder's output did not fit.",
    _ENGINE,
)
EMBEDDING_EVICTIONS: Final = Metric(
    "semel_embedding_evictions_total", "Encoder outputs that the host's memory gave up.", _ENGINE
)
EMBEDDING_CAPACITY: Final = Metric("semel_embedding_capacity_bytes", "Host memory for encoder outputs.", _ENGINE)
EMBEDDING_BYTES: Final = Metric(
    "semel_embedding_held_bytes", "Host memory in which there are encoder outputs.", _ENGINE
)
EMBEDDING_PINNED: Final = Metric(
    "semel_embedding_pinned_bytes", "Host memory from which encoder outputs are being loaded.", _ENGINE
)
EMBEDDING_FETCHES: Final = Metric(
    "semel_embedding_fetches_total",
    "Encoder outputs that were looked for in the fleet's store, by what came of it.",
    ("outcome",),
)
EMBEDDING_PUBLISHED: Final = Metric(
    "semel_embedding_published_total", "Encoder outputs that were published in the fleet's store.", ()
)
EMBEDDING_NOT_PUBLISHED: Final = Metric(
    "semel_embedding_not_published_total",
    "Encoder outputs that were to be published and were not, by reason.",
    ("reason",),
)
EMBEDDING_STORE_UP: Final = Metric(
    "semel_embedding_store_up", "Whether the fleet's store of encoder outputs is used: 1 or 0.", ()
)
EMBEDDING_STORE_CALLS: Final = Metric(
    "semel_embedding_store_calls_total", "Calls of the fleet's store, by operation.", ("operation",)
)
EMBEDDING_STORE_SECONDS: Final = Metric(
    "semel_embedding_store_seconds_total", "Time spent in calls of the fleet's store.", ("operation",)
)

# Media that a frontend fetches for its requests.
MEDIA_FETCHES: Final = Metric(
    "semel_media_fetches_total",
    "Fetches of media by how they ended: fetched, shared (found in the media store), refused, too_large, unavailable "
    "or abandoned.",
    ("outcome",),
)
MEDIA_FETCHED_BYTES: Final = Metric("semel_media_fetched_bytes_total", "Bytes of media that were fetched.")
MEDIA_FETCH_SECONDS: Final = Metric(
    "semel_media_fetch_seconds_total", "Time that fetches took, of those that were begun."
)
MEDIA_FETCHES_JOINED: Final = Metric(
    "semel_media_fetches_joined_total", "Fetches that waited for an equal one which was under way already."
)
MEDIA_FETCHES_UNSHARED: Final = Metric(
    "semel_media_fetches_unshared_total", "Fetches that did without the media store, since it was down or slow."
)
MEDIA_CACHE_QUERIES: Final = Metric(
    "semel_media_cache_queries_total", "Fetches that looked for a response that is still fresh."
)
MEDIA_CACHE_HITS: Final = Metric("semel_media_cache_hits_total", "Fetches that found one.")
MEDIA_CACHE_CONFIRMED: Final = Metric(
    "semel_media_cache_confirmed_total", "Stale responses of which their server said that they still hold."
)
MEDIA_CACHE_BYTES: Final = Metric("semel_media_cache_bytes", "Bytes of responses that are kept.")

# The media store of a frontend.
MEDIA_STORE_FILES: Final = Metric("semel_media_store_files", "Files in the media store.")
MEDIA_STORE_BYTES: Final = Metric(
    "semel_media_store_bytes", "Bytes of files in the media store; a file counts as 64 KiB at least."
)
MEDIA_STORE_CAPACITY: Final = Metric(
    "semel_media_store_capacity_bytes",
    "Bytes that the media store may have: --media-store-gb, or what fits on a disk that is smaller.",
)
MEDIA_STORE_QUERIES: Final = Metric("semel_media_store_queries_total", "Files that were looked up in the media store.")
MEDIA_STORE_HITS: Final = Metric("semel_media_store_hits_total", "Files that were looked up and found.")
MEDIA_STORE_EVICTIONS: Final = Metric(
    "semel_media_store_evictions_total", "Files that were deleted from the media store to make room."
)
MEDIA_STORE_EXPIRATIONS: Final = Metric(
    "semel_media_store_expirations_total", "Files that were deleted from the media store because they had expired."
)
MEDIA_STORE_ERRORS: Final = Metric(
    "semel_media_store_errors_total", "Operations of the media store that failed or took too long."
)
MEDIA_NAMES_LEARNED: Final = Metric(
    "semel_media_names_learned_total",
    "Names of media (uuid) that were sent to another frontend and found in the store.",
)
MEDIA_NAMES_UNSHARED: Final = Metric(
    "semel_media_names_unshared_total",
    "Lookups and writes of names of media (uuid) that did without the media store, since it was down or slow.",
)
STORED_RESPONSES: Final = Metric(
    "semel_stored_responses_total",
    "Responses that were to be stored by how it ended: stored, or failed (answered with `store: false`).",
    ("outcome",),
)

# Connections of clients, the files that decide who may connect, and the cell that they reach.
CELL_INFO: Final = Metric(
    "semel_cell_info", "Always 1; its label is the cell that the process belongs to (--cell).", ("cell",)
)
CONNECTIONS: Final = Metric(
    "semel_connections",
    "Connections of clients: busy with a request, idle after one, silent before any, or reserved for probes.",
    ("state",),
)
CONNECTIONS_LIMIT: Final = Metric(
    "semel_connections_limit",
    "The most connections that are taken: --max-connections, or what the open files of the process allow.",
)
CONNECTIONS_CLOSED: Final = Metric(
    "semel_connections_closed_total",
    "Connections that were refused (full, address), closed for another one (silent, idle, reserved), or closed because "
    "nothing came in time (late, handshake).",
    ("reason",),
)
FILE_RELOADS: Final = Metric(
    "semel_file_reloads_total",
    "Times that API keys, certificates or transport keys were read again because their file had changed: ok or failed.",
    ("file", "outcome"),
)
FILE_STALE: Final = Metric(
    "semel_file_stale",
    "1 while a file of API keys, certificates or transport keys cannot be used, and what it held before is in use.",
    ("file",),
)

# Features in all caches. Tier `processor` is a frontend's feature cache, tier `worker` the engine's item cache.
_TIER: Final = ("tier",)
MM_CACHE_QUERIES: Final = Metric(
    "semel_mm_cache_queries_total",
    "Items that were looked up: one query per item, request and tier.",
    ("model", "modality", "tier"),
)
MM_CACHE_HITS: Final = Metric(
    "semel_mm_cache_hits_total",
    "Items for which no processing was started (processor), or no payload travelled (worker).",
    ("model", "modality", "tier"),
)
VLLM_MM_CACHE_QUERIES: Final = Metric(
    "vllm:mm_cache_queries_total", "The queries of the processor tier under vLLM's name.", ("model_name",)
)
VLLM_MM_CACHE_HITS: Final = Metric(
    "vllm:mm_cache_hits_total", "The hits of the processor tier under vLLM's name.", ("model_name",)
)
MM_CACHE_BYTES: Final = Metric("semel_mm_cache_bytes", "Bytes of features that a cache holds.", _TIER)
MM_CACHE_CAPACITY: Final = Metric("semel_mm_cache_capacity_bytes", "Bytes that a cache may hold.", _TIER)
MM_CACHE_ITEMS: Final = Metric("semel_mm_cache_items", "Features that a cache holds.", _TIER)
MM_CACHE_EVICTIONS: Final = Metric("semel_mm_cache_evictions_total", "Features that were given up.", _TIER)
FLIGHTS_JOINED: Final = Metric(
    "semel_flights_joined_total", "Items that waited for processing which was under way already."
)
FEATURES_SENT: Final = Metric(
    "semel_features_sent_total", "Features that were sent to workers, in frames or by memory.", ("way",)
)
FEATURE_BYTES_SENT: Final = Metric(
    "semel_feature_sent_bytes_total", "Their bytes; those by memory passed through no socket.", ("way",)
)
FEATURE_BYTES_SAVED: Final = Metric(
    "semel_feature_saved_bytes_total", "Bytes of features that were named instead of sent."
)
FEATURES_REPAIRED: Final = Metric(
    "semel_features_repaired_total", "Features that a worker turned out to lack, and asked for."
)
LEASES: Final = Metric("semel_leases", "Features in shared memory that workers are reading.")
# Frontends.
REQUESTS: Final = Metric(
    "semel_requests_total", "Requests that were answered, by route and HTTP status.", ("route", "status")
)
PROMPT_TOKENS: Final = Metric(
    "semel_prompt_tokens_total", "Tokens of prompts that workers have taken, items included.", ("model",)
)
GENERATION_TOKENS: Final = Metric(
    "semel_generation_tokens_total", "Tokens of answers that came from workers.", ("model",)
)
_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
STAGE_SECONDS: Final = Metric(
    "semel_stage_seconds",
    "Time that a request spent in one stage of its way: parse, fetch, digest, layout, process, render, send, "
    "first_token (of a whole answer: all of it).",
    ("stage",),
    _SECONDS,
)
LOOP_LAG_SECONDS: Final = Metric(
    "semel_event_loop_lag_seconds",
    "How late a frontend's event loop comes to what is due: looked at every 50 ms.",
    (),
    (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5),
)
LOG_LINES_DROPPED: Final = Metric(
    "semel_log_lines_dropped_total", "Log lines that were dropped, because nobody read the log fast enough."
)
REFUSALS: Final = Metric("semel_refusals_total", "Requests that were refused, by the code of their error.", ("code",))
IGNORED_FIELDS: Final = Metric(
    "semel_ignored_fields_total",
    "Unknown top-level fields of requests that were ignored, by route (--unknown-fields).",
    ("route",),
)
REQUESTS_IN_FLIGHT: Final = Metric(
    "semel_requests_in_flight", "Requests that are being read or answered, streams included (--max-requests)."
)
REQUESTS_WAITING: Final = Metric(
    "semel_requests_waiting", "Requests that wait for their answer to begin (--max-waiting-requests)."
)
MEDIA_IN_FLIGHT: Final = Metric(
    "semel_media_in_flight_bytes", "Bytes of bodies and media that requests hold until they are answered."
)
MEDIA_IN_FLIGHT_LIMIT: Final = Metric(
    "semel_media_in_flight_limit_bytes", "The most that they may hold (--max-media-bytes-in-flight)."
)
REQUESTS_CALLED_BACK: Final = Metric(
    "semel_requests_called_back_total",
    "Requests that were ended because their tenant had more than its share while another asked, by the code of their "
    "error.",
    ("code",),
)
_TENANT: Final = ("tenant",)
TENANT_MEDIA_IN_FLIGHT: Final = Metric(
    "semel_tenant_media_in_flight_bytes", "The same bytes, by tenant (--metrics-per-tenant).", _TENANT
)
TENANT_REQUESTS_WAITING: Final = Metric(
    "semel_tenant_requests_waiting",
    "Requests that wait for their answer to begin, by tenant (--metrics-per-tenant).",
    _TENANT,
)
TENANT_REQUESTS_CALLED_BACK: Final = Metric(
    "semel_tenant_requests_called_back_total",
    "Requests that were called back, by tenant (--metrics-per-tenant).",
    _TENANT,
)
POOL_ASSEMBLED: Final = Metric("semel_pool_assembled_total", "Prompts that the model's processor assembled.")
POOL_DECODED: Final = Metric("semel_pool_decoded_total", "Media that were given to a process to decode.")
POOL_PROCESSED: Final = Metric("semel_pool_processed_total", "Items that were preprocessed.")
POOL_FAILED: Final = Metric("semel_pool_failed_total", "Items whose preprocessing ended in an error.")
POOL_REPLACED: Final = Metric(
    "semel_pool_replaced_total", "Preprocessing processes that took the place of one that had ended."
)
POOL_WAITING: Final = Metric("semel_pool_waiting", "Items and prompts that wait for a preprocessing process.")
POOL_BUSY: Final = Metric("semel_pool_busy", "Preprocessing processes that work on an item.")
POOL_PROCESSES: Final = Metric(
    "semel_pool_processes",
    "Preprocessing processes that are loaded, without the spare ones (--preprocessing-processes).",
)
POOL_SANDBOXED: Final = Metric(
    "semel_pool_sandboxed",
    "Preprocessing processes that have this layer of the sandbox around them, without the spare ones.",
    ("layer",),
)
WORKERS: Final = Metric("semel_workers", "Workers by state: serving, ejected, refused, not_connected.", ("state",))
WORKER_CONNECTED: Final = Metric("semel_worker_connected", "1 while the worker is connected, else 0.", ("worker",))
LINK_KEY_GENERATION: Final = Metric(
    "semel_link_key_generation",
    "The generation of transport keys that the link to the worker was opened with; 0 for those of a fleet key.",
    ("worker",),
)
WORKER_EJECTED: Final = Metric(
    "semel_worker_ejected",
    "1 while the worker gets no requests but trials, because it failed others (--eject-after-failures), else 0.",
    ("worker",),
)
WORKER_REFUSED: Final = Metric(
    "semel_worker_refused",
    "1 while the worker is not used because it differs from the fleet or this frontend; the log says in what.",
    ("worker", "reason"),
)
WORKER_EJECTIONS: Final = Metric(
    "semel_worker_ejections_total", "Times that a worker was ejected because it failed requests."
)
FAILOVERS: Final = Metric(
    "semel_failovers_total",
    "Requests that went to another worker because theirs failed or was lost, by the code of the error.",
    ("code",),
)
ENGINES_LOST: Final = Metric(
    "semel_engines_lost_total",
    "Engines that ended while a frontend was connected to their worker, by code: engine_dead, engine_hung, or gone and "
    "silence if the worker could not say more.",
    ("code",),
)
WORKER_RUNNING: Final = Metric(
    "semel_worker_running_requests", "Requests that the worker's engine is answering, of all frontends.", ("worker",)
)

# Any process with tracing.
SPANS_DROPPED: Final = Metric(
    "semel_spans_dropped_total",
    "Spans that no collector got (--otlp-traces-endpoint), by the reason: queue_full or not_delivered.",
    ("reason",),
)

# vLLM's own server, with `SEMEL=1`.
DOOR_EVENTS: Final = Metric(
    "semel_vllm_plugin_events_total",
    "Events of `SEMEL=1` inside vLLM's own server: decodes, decodes_saved, preprocessed, joined, pool_refusals, lost "
    "items of the engine core's cache, and requests that were repaired.",
    ("event",),
)

METRICS: Final = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""Every metric of semel, in the order of the documentation."""
