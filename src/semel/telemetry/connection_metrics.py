"""The metrics of clients' connections, of the files that decide who may connect, and of the cell that they reach."""

from __future__ import annotations

from typing import Final

from semel.telemetry.metric import Metric

__all__ = ["CELL_INFO", "CONNECTIONS", "CONNECTIONS_CLOSED", "CONNECTIONS_LIMIT", "FILE_RELOADS", "FILE_STALE"]

CELL_INFO: Final = Metric(
    "semel_cell_info", "gauge", "Always 1; its label is the cell that the process belongs to (--cell).", ("cell",)
)

CONNECTIONS: Final = Metric(
    "semel_connections",
    "gauge",
    "Connections of clients: busy with a request, idle after one, silent before any, or reserved for probes.",
    ("state",),
)
CONNECTIONS_LIMIT: Final = Metric(
    "semel_connections_limit",
    "gauge",
    "The most connections that are taken: --max-connections, or what the open files of the process allow.",
)
CONNECTIONS_CLOSED: Final = Metric(
    "semel_connections_closed_total",
    "counter",
    "Connections that were refused (full, address), closed for another one (silent, idle, reserved), or closed because "
    "nothing came in time (late, handshake).",
    ("reason",),
)
FILE_RELOADS: Final = Metric(
    "semel_file_reloads_total",
    "counter",
    "Times that API keys, certificates or transport keys were read again because their file had changed: ok or failed.",
    ("file", "outcome"),
)
FILE_STALE: Final = Metric(
    "semel_file_stale",
    "gauge",
    "1 while a file of API keys, certificates or transport keys cannot be used, and what it held before is in use.",
    ("file",),
)
