"""The metrics of media that a frontend fetches and stores."""

from __future__ import annotations

from typing import Final

from semel.telemetry.metric import Metric

__all__ = [
    "MEDIA_CACHE_BYTES",
    "MEDIA_CACHE_CONFIRMED",
    "MEDIA_CACHE_HITS",
    "MEDIA_CACHE_QUERIES",
    "MEDIA_FETCHED_BYTES",
    "MEDIA_FETCHES",
    "MEDIA_FETCHES_JOINED",
    "MEDIA_FETCH_SECONDS",
    "MEDIA_STORE_BYTES",
    "MEDIA_STORE_CAPACITY",
    "MEDIA_STORE_ERRORS",
    "MEDIA_STORE_EVICTIONS",
    "MEDIA_STORE_EXPIRATIONS",
    "MEDIA_STORE_FILES",
    "MEDIA_STORE_HITS",
    "MEDIA_STORE_QUERIES",
]

# Media that a frontend fetches for its requests.
MEDIA_FETCHES: Final = Metric(
    "semel_media_fetches_total",
    "counter",
    "Fetches of media by how they ended: fetched, refused, too_large, unavailable or abandoned.",
    ("outcome",),
)
MEDIA_FETCHED_BYTES: Final = Metric("semel_media_fetched_bytes_total", "counter", "Bytes of media that were fetched.")
MEDIA_FETCH_SECONDS: Final = Metric(
    "semel_media_fetch_seconds_total", "counter", "Time that fetches took, of those that were begun."
)
MEDIA_FETCHES_JOINED: Final = Metric(
    "semel_media_fetches_joined_total", "counter", "Fetches that waited for an equal one which was under way already."
)
MEDIA_CACHE_QUERIES: Final = Metric(
    "semel_media_cache_queries_total", "counter", "Fetches that looked for a response that is still fresh."
)
MEDIA_CACHE_HITS: Final = Metric("semel_media_cache_hits_total", "counter", "Fetches that found one.")
MEDIA_CACHE_CONFIRMED: Final = Metric(
    "semel_media_cache_confirmed_total", "counter", "Stale responses of which their server said that they still hold."
)
MEDIA_CACHE_BYTES: Final = Metric("semel_media_cache_bytes", "gauge", "Bytes of responses that are kept.")

# The media store of a frontend.
MEDIA_STORE_FILES: Final = Metric("semel_media_store_files", "gauge", "Files in the media store.")
MEDIA_STORE_BYTES: Final = Metric(
    "semel_media_store_bytes", "gauge", "Bytes of files in the media store; a file counts as 64 KiB at least."
)
MEDIA_STORE_CAPACITY: Final = Metric(
    "semel_media_store_capacity_bytes",
    "gauge",
    "Bytes that the media store may have: --media-store-gb, or what fits on a disk that is smaller.",
)
MEDIA_STORE_QUERIES: Final = Metric(
    "semel_media_store_queries_total", "counter", "Files that were looked up in the media store."
)
MEDIA_STORE_HITS: Final = Metric("semel_media_store_hits_total", "counter", "Files that were looked up and found.")
MEDIA_STORE_EVICTIONS: Final = Metric(
    "semel_media_store_evictions_total", "counter", "Files that were deleted from the media store to make room."
)
MEDIA_STORE_EXPIRATIONS: Final = Metric(
    "semel_media_store_expirations_total",
    "counter",
    "Files that were deleted from the media store because they had expired.",
)
MEDIA_STORE_ERRORS: Final = Metric(
    "semel_media_store_errors_total", "counter", "Operations of the media store that failed or took too long."
)
