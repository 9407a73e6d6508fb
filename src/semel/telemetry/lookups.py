"""Queries and hits of the feature and item caches (requirement D8): exactly one per item and tier, and a log line."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from semel.telemetry import metrics
from semel.telemetry.meter import Sample

__all__ = ["CacheLookups", "Tier"]

Tier = Literal["processor", "worker"]
"""`processor`: a hit means that no processing started. `worker`: a hit means that no payload was sent."""

_LOG_S: Final = 10.0

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Count:
    queries: int = 0
    hits: int = 0


class CacheLookups:
    """Counts the cache lookups of this process."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, Tier], _Count] = {}
        self._reported: dict[Tier, _Count] = {}

    def count(self, model: str, modality: str, tier: Tier, count: int, hit: bool) -> None:
        """Count lookups of items of one modality in one tier."""
        entry = self._counts.setdefault((model, modality, tier), _Count())
        entry.queries += count
        entry.hits += count * hit

    def samples(self) -> Iterator[Sample]:
        """Yield the counters. Those of tier `processor` also have vLLM's names, so that vLLM's dashboards work."""
        for labels, entry in self._counts.items():
            yield metrics.MM_CACHE_QUERIES, entry.queries, labels
            yield metrics.MM_CACHE_HITS, entry.hits, labels
        for model in {model for model, _, tier in self._counts if tier == "processor"}:
            of_model = [
                entry for (name, _, tier), entry in self._counts.items() if (name, tier) == (model, "processor")
            ]
            yield metrics.VLLM_MM_CACHE_QUERIES, sum(entry.queries for entry in of_model), (model,)
            yield metrics.VLLM_MM_CACHE_HITS, sum(entry.hits for entry in of_model), (model,)

    def line(self) -> str | None:
        """Return the hit rate of every tier since the last line; None without lookups."""
        parts = []
        for tier in ("processor", "worker"):
            of_tier = [entry for (_, _, its), entry in self._counts.items() if its == tier]
            now = _Count(sum(entry.queries for entry in of_tier), sum(entry.hits for entry in of_tier))
            before, self._reported[tier] = self._reported.get(tier, _Count()), now
            if queries := now.queries - before.queries:
                parts.append(f"{tier} {(now.hits - before.hits) / queries:.1%} of {queries:,}")
        return f"item cache hits: {', '.join(parts)}" if parts else None

    async def log_lines(self) -> None:
        """Log the line every ten seconds, for ever."""
        while True:
            await asyncio.sleep(_LOG_S)
            if (line := self.line()) is not None:
                logger.info("%s", line)
