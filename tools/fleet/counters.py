"""The counters of a fleet, read over HTTP and added up; what a load did is the difference of two readings."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

from semel.telemetry import metrics
from semel.telemetry.meter import Metric
from tests.serve.served import sum_of
from tools.fleet.processes import Node

SETTLE_S = 60.0
PAUSE_S = 0.25
TOLD_S = 0.03  # workers tell what they are answering every 20 ms


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
        front = "\n".join(node.metrics() for node in frontends)
        back = "\n".join(node.metrics() for node in workers)
        processor, worker = 'tier="processor"', 'tier="worker"'
        frames, memory = 'way="frames"', 'way="memory"'

        def total(text: str, metric: Metric, labels: str = "") -> int:
            return int(sum_of(text, metric.name, labels))

        return cls(
            processor_queries=total(front, metrics.MM_CACHE_QUERIES, processor),
            processor_hits=total(front, metrics.MM_CACHE_HITS, processor),
            worker_queries=total(front, metrics.MM_CACHE_QUERIES, worker),
            worker_hits=total(front, metrics.MM_CACHE_HITS, worker),
            processed=total(front, metrics.POOL_PROCESSED),
            unprocessed=total(front, metrics.POOL_FAILED),
            joined=total(front, metrics.FLIGHTS_JOINED),
            sent_in_frames=total(front, metrics.FEATURES_SENT, frames),
            sent_by_memory=total(front, metrics.FEATURES_SENT, memory),
            frames_bytes=total(front, metrics.FEATURE_BYTES_SENT, frames),
            memory_bytes=total(front, metrics.FEATURE_BYTES_SENT, memory),
            saved_bytes=total(front, metrics.FEATURE_BYTES_SAVED),
            repaired=total(front, metrics.FEATURES_REPAIRED),
            processor_evictions=total(front, metrics.MM_CACHE_EVICTIONS, processor),
            injected_queries=total(back, metrics.MM_CACHE_QUERIES, worker),
            injected_hits=total(back, metrics.MM_CACHE_HITS, worker),
            needs=total(back, metrics.NEEDS),
            resubmissions=total(back, metrics.RESUBMISSIONS),
            worker_evictions=total(back, metrics.MM_CACHE_EVICTIONS, worker),
            encoder_queries=total(back, metrics.ENCODER_CACHE_QUERIES),
            encoder_hits=total(back, metrics.ENCODER_CACHE_HITS),
            encoder_evictions=total(back, metrics.ENCODER_CACHE_EVICTIONS),
            encoded=total(back, metrics.ENCODER_PLANNED) - total(back, metrics.EMBEDDING_LOADS),
            vllm_queries=total(f"{front}\n{back}", metrics.VLLM_MM_CACHE_QUERIES),
            vllm_hits=total(f"{front}\n{back}", metrics.VLLM_MM_CACHE_HITS),
        )

    def __sub__(self, other: Self) -> Self:
        return type(self)(*(getattr(self, one.name) - getattr(other, one.name) for one in fields(self)))

    @property
    def processor_misses(self) -> int:
        return self.processor_queries - self.processor_hits

    @property
    def worker_misses(self) -> int:
        return self.worker_queries - self.worker_hits

    @property
    def sent(self) -> int:
        return self.sent_in_frames + self.sent_by_memory


async def until_idle(frontends: Sequence[Node]) -> None:
    """Wait until every frontend has heard that no worker answers anything: it decides where the next request goes."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        await asyncio.sleep(TOLD_S)
        if not any(_running(node) for node in frontends):
            return
        assert time.monotonic() < deadline, f"requests run after {SETTLE_S:g} s"


def _running(frontend: Node) -> float:
    return sum_of(frontend.metrics(), metrics.WORKER_RUNNING.name)


def settled(frontends: Sequence[Node], workers: Sequence[Node]) -> Counts:
    """The counters once nothing is running and they stand still."""
    deadline = time.monotonic() + SETTLE_S
    before = None
    while True:
        now = Counts.read(frontends, workers)
        running = sum(map(_running, frontends))
        if now == before and not running:
            return now
        assert time.monotonic() < deadline, f"after {SETTLE_S:g} s {running:g} requests run; {now}"
        before = now
        time.sleep(PAUSE_S)
