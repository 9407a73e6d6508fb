"""The Grafana dashboard: its panels are one table, so that renaming a metric is one change."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from semel.telemetry import metrics
from semel.telemetry.meter import Metric

__all__ = ["PANELS", "Panel", "dashboard"]

_WIDTH: Final = 8
_HEIGHT: Final = 7
_COLUMNS: Final = 3
_LEGEND: Final = {"displayMode": "table", "placement": "right", "showLegend": True, "calcs": ["lastNotNull"]}
"""Next to the curves, with the last value of each."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A plot: the name and query of each line."""

    title: str
    about: str
    unit: str
    """One of Grafana's units: s, percentunit, Bps, bytes, or short, for plain numbers."""

    queries: Mapping[str, str]


def _rate(metric: Metric, by: str = "", only: str = "") -> str:
    """Return how much a second."""
    return f"sum{f' by ({by}) ' if by else ''}(rate({metric.name}{only}[$__rate_interval]))"


def _per_minute(metric: Metric, by: str = "") -> str:
    """Of what is rare: a number that needs no thousandths."""
    return f"60 * {_rate(metric, by)}"


def _share(hits: Metric, queries: Metric, by: str = "") -> str:
    return f"{_rate(hits, by)} / {_rate(queries, by)}"


def _quantile(q: float) -> str:
    buckets = f"sum by (le, stage) (rate({metrics.STAGE_SECONDS.name}_bucket[$__rate_interval]))"
    return f"histogram_quantile({q}, {buckets})"


_NO_PROBES: Final = '{route!~"/metrics|/health|/ready|/ping"}'
_CONNECTED: Final = f"max by (worker) ({metrics.WORKER_CONNECTED.name}) == 1"
PANELS: Final = (
    Panel(
        "Requests per second",
        "By route and status, without probes.",
        "short",
        {"{{route}} {{status}}": _rate(metrics.REQUESTS, "route, status", _NO_PROBES)},
    ),
    Panel(
        "Tokens per second",
        "Of prompts that workers took, and of answers.",
        "short",
        {
            "prompts, {{model}}": _rate(metrics.PROMPT_TOKENS, "model"),
            "answers, {{model}}": _rate(metrics.GENERATION_TOKENS, "model"),
        },
    ),
    Panel(
        "Requests at each worker",
        "What its engine is answering; a worker that is not connected has a gap.",
        "short",
        {"{{worker}}": f"max by (worker) ({metrics.WORKER_RUNNING.name}) and on (worker) {_CONNECTED}"},
    ),
    Panel("Median time by stage", "Where requests spend their time.", "s", {"{{stage}}": _quantile(0.5)}),
    Panel("95% time by stage", "Nineteen of twenty requests are faster.", "s", {"{{stage}}": _quantile(0.95)}),
    Panel(
        "Workers not used",
        "Refused because they differ, ejected because they fail, or not connected.",
        "short",
        {
            "not connected": f"count(max by (worker) ({metrics.WORKER_CONNECTED.name}) == 0) or vector(0)",
            "refused, {{reason}}": f"count by (reason) (max by (worker, reason) ({metrics.WORKER_REFUSED.name}))",
            "ejected": f"sum(max by (worker) ({metrics.WORKER_EJECTED.name}))",
        },
    ),
    Panel(
        "Items processed per second",
        "Made, failed, and joined to work that was under way.",
        "short",
        {
            "made": _rate(metrics.POOL_PROCESSED),
            "failed": _rate(metrics.POOL_FAILED),
            "joined": _rate(metrics.FLIGHTS_JOINED),
        },
    ),
    Panel(
        "Preprocessing processes",
        "Those that work, those that there are, and what waits for one.",
        "short",
        {
            "busy": f"sum({metrics.POOL_BUSY.name})",
            "processes": f"sum({metrics.POOL_PROCESSES.name})",
            "items waiting": f"sum({metrics.POOL_WAITING.name})",
        },
    ),
    Panel(
        "Requests waiting for their turn",
        "At each worker, before its engine has them.",
        "short",
        {"{{instance}}": f"sum by (instance) ({metrics.ENGINE_WAITING.name})"},
    ),
    Panel(
        "Hit rate",
        "Items that were not processed (processor), and items that did not travel (worker).",
        "percentunit",
        {"{{tier}}": _share(metrics.MM_CACHE_HITS, metrics.MM_CACHE_QUERIES, "tier")},
    ),
    Panel(
        "Bytes of features per second",
        "What was named instead of sent, and what was sent.",
        "Bps",
        {"saved": _rate(metrics.FEATURE_BYTES_SAVED), "sent, {{way}}": _rate(metrics.FEATURE_BYTES_SENT, "way")},
    ),
    Panel(
        "Feature caches",
        "Of frontends.",
        "bytes",
        {
            "in use": f'sum({metrics.MM_CACHE_BYTES.name}{{tier="processor"}})',
            "capacity": f'sum({metrics.MM_CACHE_CAPACITY.name}{{tier="processor"}})',
        },
    ),
    Panel(
        "Repairs per minute",
        "Faults that no client saw: items that were gone, requests that went in again or elsewhere, what was ended.",
        "short",
        {
            "features repaired": _per_minute(metrics.FEATURES_REPAIRED),
            "features requested": _per_minute(metrics.NEEDS),
            "resubmissions": _per_minute(metrics.RESUBMISSIONS),
            "failovers": _per_minute(metrics.FAILOVERS),
            "workers ejected": _per_minute(metrics.WORKER_EJECTIONS),
            "processes replaced": _per_minute(metrics.POOL_REPLACED),
        },
    ),
    Panel(
        "Encoder cache hit rate",
        "Inside the engines.",
        "percentunit",
        {"{{instance}}": _share(metrics.ENCODER_CACHE_HITS, metrics.ENCODER_CACHE_QUERIES, "instance")},
    ),
    Panel(
        "Evictions per minute",
        "Features, by cache, and the engines' encoder outputs.",
        "short",
        {
            "{{tier}}": _per_minute(metrics.MM_CACHE_EVICTIONS, "tier"),
            "encoder outputs": _per_minute(metrics.ENCODER_CACHE_EVICTIONS),
        },
    ),
)


def dashboard() -> str:
    """Return the dashboard in Grafana's JSON, ready for import."""
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
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": {"spanNulls": False, "lineWidth": 1}}},
        "options": {"legend": _LEGEND, "tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": targets,
    }


if __name__ == "__main__":
    sys.stdout.write(dashboard())
