"""The Grafana dashboard: its panels are one table, so that renaming a metric is one change."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from semel.telemetry.metrics import (
    ENCODER_CACHE_EVICTIONS,
    ENCODER_CACHE_HITS,
    ENCODER_CACHE_QUERIES,
    FAILOVERS,
    FEATURE_BYTES_SAVED,
    FEATURE_BYTES_SENT,
    FEATURES_REPAIRED,
    FLIGHTS_JOINED,
    MM_CACHE_BYTES,
    MM_CACHE_CAPACITY,
    MM_CACHE_EVICTIONS,
    MM_CACHE_HITS,
    MM_CACHE_QUERIES,
    NEEDS,
    POOL_FAILED,
    POOL_PROCESSED,
    POOL_REPLACED,
    REQUESTS,
    RESUBMISSIONS,
    STAGE_SECONDS,
    WORKER_CONNECTED,
    WORKER_EJECTIONS,
    WORKER_RUNNING,
    Metric,
)

__all__ = ["PANELS", "Panel", "dashboard"]

_WIDTH: Final = 8
_HEIGHT: Final = 7
_COLUMNS: Final = 3


@dataclass(frozen=True, slots=True)
class Panel:
    """A plot: the name and query of each line."""

    title: str
    about: str
    unit: str
    """One of Grafana's units: reqps, s, percentunit, Bps, bytes, short."""

    queries: Mapping[str, str]


def _rate(metric: Metric, by: str = "") -> str:
    return f"sum{f' by ({by}) ' if by else ''}(rate({metric.name}[$__rate_interval]))"


def _share(hits: Metric, queries: Metric, by: str = "") -> str:
    return f"{_rate(hits, by)} / {_rate(queries, by)}"


def _quantile(q: float) -> str:
    buckets = f"sum by (le, stage) (rate({STAGE_SECONDS.name}_bucket[$__rate_interval]))"
    return f"histogram_quantile({q}, {buckets})"


PANELS: Final = (
    Panel("Requests", "By route and status.", "reqps", {"{{route}} {{status}}": _rate(REQUESTS, "route, status")}),
    Panel("Median time by stage", "Where requests spend their time.", "s", {"{{stage}}": _quantile(0.5)}),
    Panel("95% time by stage", "Nineteen of twenty requests are faster.", "s", {"{{stage}}": _quantile(0.95)}),
    Panel(
        "Hit rate",
        "Items that were not processed (processor), and items that did not travel (worker).",
        "percentunit",
        {"{{tier}}": _share(MM_CACHE_HITS, MM_CACHE_QUERIES, "tier")},
    ),
    Panel(
        "Bytes of features",
        "What was named instead of sent, and what was sent.",
        "Bps",
        {"saved": _rate(FEATURE_BYTES_SAVED), "sent, {{way}}": _rate(FEATURE_BYTES_SENT, "way")},
    ),
    Panel(
        "Feature caches",
        "Of frontends.",
        "bytes",
        {
            "held": f'sum({MM_CACHE_BYTES.name}{{tier="processor"}})',
            "capacity": f'sum({MM_CACHE_CAPACITY.name}{{tier="processor"}})',
        },
    ),
    Panel(
        "Preprocessing",
        "Items that were made, that failed, and that joined work which was under way.",
        "reqps",
        {"made": _rate(POOL_PROCESSED), "failed": _rate(POOL_FAILED), "joined": _rate(FLIGHTS_JOINED)},
    ),
    Panel(
        "Workers",
        "Requests that each is answering; a worker at -1 is not connected.",
        "short",
        {"{{worker}}": f"max by (worker) ({WORKER_RUNNING.name}) - (1 - max by (worker) ({WORKER_CONNECTED.name}))"},
    ),
    Panel(
        "Repairs",
        "Faults that no client saw: items that were gone, requests that went in again or elsewhere, what was ended.",
        "reqps",
        {
            "features repaired": _rate(FEATURES_REPAIRED),
            "needs": _rate(NEEDS),
            "resubmissions": _rate(RESUBMISSIONS),
            "failovers": _rate(FAILOVERS),
            "workers ejected": _rate(WORKER_EJECTIONS),
            "processes replaced": _rate(POOL_REPLACED),
        },
    ),
    Panel("Features given up", "By cache.", "reqps", {"{{tier}}": _rate(MM_CACHE_EVICTIONS, "tier")}),
    Panel(
        "Encoder cache hit rate",
        "Inside the engines.",
        "percentunit",
        {"{{engine}}": _share(ENCODER_CACHE_HITS, ENCODER_CACHE_QUERIES, "engine")},
    ),
    Panel(
        "Encoder outputs given up",
        "By engine.",
        "reqps",
        {"{{engine}}": _rate(ENCODER_CACHE_EVICTIONS, "engine")},
    ),
)


def dashboard() -> str:
    """The dashboard in Grafana's JSON, ready for import."""
    panels = [_panel(number, panel) for number, panel in enumerate(PANELS)]
    source = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    body = {
        "title": "semel",
        "uid": "semel",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [source]},
        "panels": panels,
    }
    return json.dumps(body, indent=1) + "\n"


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, _COLUMNS)
    targets = [
        {"refId": chr(ord("A") + index), "expr": query, "legendFormat": legend}
        for index, (legend, query) in enumerate(panel.queries.items())
    ]
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0 if panel.title != "Workers" else -1}},
        "targets": targets,
    }


if __name__ == "__main__":
    sys.stdout.write(dashboard())
