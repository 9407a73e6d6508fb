"""vLLM's statistics in the process that embeds it: its metrics, and its counters of the item cache.

vLLM's own loggers register its metrics with prometheus_client's default registry, whence a worker exports them under
their names. Two things differ from vLLM's server. `vllm:mm_cache_*` counts what is injected and what clients sent as
tensors; what a frontend rendered, that frontend counts (D8). And with `--disable-log-stats` nothing is recorded, but
the engine core goes on reporting its steps: an engine that hangs is noticed by them.
"""

from __future__ import annotations

from typing import Any, Final

from prometheus_client import REGISTRY
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import MultiModalCacheStats

from semel.telemetry.meter import Meter

__all__ = ["NoStatistics", "count_items", "export_metrics", "stat_loggers"]

_PREFIX: Final = "vllm:"


class NoStatistics(PrometheusStatLogger):  # type: ignore[misc]
    """A logger that records nothing. An engine core with any logger of statistics reports every step.

    It is of vLLM's class for Prometheus because vLLM adds that one wherever there is none.
    """

    def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
        self.vllm_config = vllm_config
        self.engine_indexes = [0] if engine_indexes is None else engine_indexes

    def record(self, *_: Any, **__: Any) -> None:
        """Drop it."""

    def record_admission_rejection(self, reason: str) -> None:
        """Drop it."""

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """Drop it."""

    def log_engine_initialized(self) -> None:
        """Log nothing."""


def stat_loggers(arguments: Any) -> list[type[NoStatistics]]:
    """Return what to add to vLLM's own loggers of statistics for an engine with these `AsyncEngineArgs`."""
    return [NoStatistics] if arguments.disable_log_stats else []


def export_metrics(meter: Meter) -> None:
    """Let a scrape show vLLM's metrics: all that this process registered, also those of parsers and plug-ins."""
    meter.export(REGISTRY, prefix=_PREFIX)


def count_items(llm: Any, queries: int, hits: int) -> None:
    """Count lookups of the item cache for one request, as vLLM does for what it renders itself."""
    if llm.logger_manager is None or not queries:
        return
    lookups = MultiModalCacheStats()
    lookups.record(queries, hits)
    engine = llm.logger_manager.engine_indexes[0]
    llm.logger_manager.record(None, None, mm_cache_stats=lookups, engine_idx=engine)
