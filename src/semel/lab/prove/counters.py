"""The counters of a fleet, read over HTTP and added up; what a load did is the difference of two readings."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final, Self

from semel.lab.prove.processes import Node
from semel.telemetry import metrics
from semel.telemetry.meter import Metric
from semel.telemetry.scrape import Scrape

__all__ = ["Counts", "settled", "until_idle"]

_SETTLE_S: Final = 60.0
_PAUSE_S: Final = 0.25
_LOAD_S: Final = 0.03  # workers tell what they are answering every 20 ms


@dataclass(frozen=True, slots=True)
class Counts:
    """Totals over frontends (the first ones) and workers (the last ones)."""

    processor_queries: int
    processor_hits: int
    worker_queries: int
    worker_hits: int
    processed: int
    unprocessed: int
    """Items whose preprocessing failed."""

    joined: int
    sent_in_frames: int
    sent_by_memory: int
    frames_bytes: int
    memory_bytes: int
    saved_bytes: int
    repaired: int
    processor_evictions: int
    injected_queries: int
    injected_hits: int
    needs: int
    resubmissions: int
    worker_evictions: int
    encoder_queries: int
    encoder_hits: int
    encoder_evictions: int
    encoded: int
    """Encoder outputs that engines made."""

    vllm_queries: int
    """Under vLLM's name, of frontends and workers."""

    vllm_hits: int

    @classmethod
    def read(cls, frontends: Sequence[Node], workers: Sequence[Node]) -> Self:
        """The counters as they are now."""
        sides = [[Scrape.parse(node.metrics()) for node in nodes] for nodes in (frontends, workers)]

        def front(metric: Metric, **labels: str) -> int:
            return int(sum(one.total(metric, **labels) for one in sides[0]))

        def back(metric: Metric, **labels: str) -> int:
            return int(sum(one.total(metric, **labels) for one in sides[1]))

        return cls(
            processor_queries=front(metrics.MM_CACHE_QUERIES, tier="processor"),
            processor_hits=front(metrics.MM_CACHE_HITS, tier="processor"),
            worker_queries=front(metrics.MM_CACHE_QUERIES, tier="worker"),
            worker_hits=front(metrics.MM_CACHE_HITS, tier="worker"),
            processed=front(metrics.POOL_PROCESSED),
            unprocessed=front(metrics.POOL_FAILED),
            joined=front(metrics.FLIGHTS_JOINED),
            sent_in_frames=front(metrics.FEATURES_SENT, way="frames"),
            sent_by_memory=front(metrics.FEATURES_SENT, way="memory"),
            frames_bytes=front(metrics.FEATURE_BYTES_SENT, way="frames"),
            memory_bytes=front(metrics.FEATURE_BYTES_SENT, way="memory"),
            saved_bytes=front(metrics.FEATURE_BYTES_SAVED),
            repaired=front(metrics.FEATURES_REPAIRED),
            processor_evictions=front(metrics.MM_CACHE_EVICTIONS, tier="processor"),
            injected_queries=back(metrics.MM_CACHE_QUERIES, tier="worker"),
            injected_hits=back(metrics.MM_CACHE_HITS, tier="worker"),
            needs=back(metrics.NEEDS),
            resubmissions=back(metrics.RESUBMISSIONS),
            worker_evictions=back(metrics.MM_CACHE_EVICTIONS, tier="worker"),
            encoder_queries=back(metrics.ENCODER_CACHE_QUERIES),
            encoder_hits=back(metrics.ENCODER_CACHE_HITS),
            encoder_evictions=back(metrics.ENCODER_CACHE_EVICTIONS),
            encoded=back(metrics.ENCODER_PLANNED) - back(metrics.EMBEDDING_LOADS),
            vllm_queries=front(metrics.VLLM_MM_CACHE_QUERIES) + back(metrics.VLLM_MM_CACHE_QUERIES),
            vllm_hits=front(metrics.VLLM_MM_CACHE_HITS) + back(metrics.VLLM_MM_CACHE_HITS),
        )

    def __sub__(self, other: Self) -> Self:
        return type(self)(*(getattr(self, one.name) - getattr(other, one.name) for one in fields(self)))

    @property
    def processor_misses(self) -> int:
        """Items that no frontend had."""
        return self.processor_queries - self.processor_hits

    @property
    def worker_misses(self) -> int:
        """Items that the worker of a request lacked."""
        return self.worker_queries - self.worker_hits

    @property
    def sent(self) -> int:
        """Features that went to workers."""
        return self.sent_in_frames + self.sent_by_memory


async def until_idle(frontends: Sequence[Node]) -> None:
    """Wait until every frontend has heard that no worker answers anything: it decides where the next request goes."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        await asyncio.sleep(_LOAD_S)
        if not any(_running(node) for node in frontends):
            return
        assert time.monotonic() < deadline, f"requests run after {_SETTLE_S:g} s"


def _running(frontend: Node) -> float:
    return Scrape.parse(frontend.metrics()).total(metrics.WORKER_RUNNING)


def settled(frontends: Sequence[Node], workers: Sequence[Node]) -> Counts:
    """The counters once nothing is running and they stand still."""
    deadline = time.monotonic() + _SETTLE_S
    before = None
    while True:
        now = Counts.read(frontends, workers)
        running = sum(map(_running, frontends))
        if now == before and not running:
            return now
        assert time.monotonic() < deadline, f"after {_SETTLE_S:g} s {running:g} requests run; {now}"
        before = now
        time.sleep(_PAUSE_S)
