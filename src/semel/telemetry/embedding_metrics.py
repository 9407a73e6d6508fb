"""Metrics of encoder outputs beside the device: in the host's memory and in the fleet's store.

`engine` is the engine core's rank.
"""

from __future__ import annotations

from typing import Final

from semel.telemetry.metric import Metric

__all__ = [
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
]

_ENGINE: Final = ("engine",)
_TIER: Final = ("engine", "tier")
EMBEDDING_LOADS: Final = Metric(
    "semel_embedding_loads_total", "counter", "Encoder outputs that were loaded instead of encoded.", _TIER
)
EMBEDDING_LOAD_BYTES: Final = Metric(
    "semel_embedding_load_bytes_total", "counter", "Bytes of encoder outputs that were loaded.", _TIER
)
EMBEDDING_LOAD_SECONDS: Final = Metric(
    "semel_embedding_load_seconds_total", "counter", "Time spent loading encoder outputs.", _TIER
)
EMBEDDING_SAVES: Final = Metric(
    "semel_embedding_saves_total", "counter", "Encoder outputs that were copied to the host's memory.", _ENGINE
)
EMBEDDING_SAVE_BYTES: Final = Metric(
    "semel_embedding_save_bytes_total", "counter", "Bytes of encoder outputs that were copied there.", _ENGINE
)
EMBEDDING_SAVE_SECONDS: Final = Metric(
    "semel_embedding_save_seconds_total", "counter", "Time spent copying encoder outputs there.", _ENGINE
)
EMBEDDING_NOT_SAVED: Final = Metric(
    "semel_embedding_not_saved_total",
    "counter",
    "Encoder outputs that were not copied there: no room, or the encoder's output did not fit.",
    _ENGINE,
)
EMBEDDING_EVICTIONS: Final = Metric(
    "semel_embedding_evictions_total", "counter", "Encoder outputs that the host's memory gave up.", _ENGINE
)
EMBEDDING_CAPACITY: Final = Metric(
    "semel_embedding_capacity_bytes", "gauge", "Host memory for encoder outputs.", _ENGINE
)
EMBEDDING_BYTES: Final = Metric(
    "semel_embedding_held_bytes", "gauge", "Host memory in which there are encoder outputs.", _ENGINE
)
EMBEDDING_PINNED: Final = Metric(
    "semel_embedding_pinned_bytes", "gauge", "Host memory from which encoder outputs are being loaded.", _ENGINE
)
EMBEDDING_FETCHES: Final = Metric(
    "semel_embedding_fetches_total",
    "counter",
    "Encoder outputs that were looked for in the fleet's store, by what came of it.",
    ("outcome",),
)
EMBEDDING_PUBLISHED: Final = Metric(
    "semel_embedding_published_total", "counter", "Encoder outputs that were published in the fleet's store.", ()
)
EMBEDDING_NOT_PUBLISHED: Final = Metric(
    "semel_embedding_not_published_total",
    "counter",
    "Encoder outputs that were to be published and were not, by reason.",
    ("reason",),
)
EMBEDDING_STORE_UP: Final = Metric(
    "semel_embedding_store_up", "gauge", "Whether the fleet's store of encoder outputs is used: 1 or 0.", ()
)
EMBEDDING_STORE_CALLS: Final = Metric(
    "semel_embedding_store_calls_total", "counter", "Calls of the fleet's store, by operation.", ("operation",)
)
EMBEDDING_STORE_SECONDS: Final = Metric(
    "semel_embedding_store_seconds_total", "counter", "Time spent in calls of the fleet's store.", ("operation",)
)
