"""The work of a fleet's processes by their own counters, and their memory, read again and again while they run.

A process that is killed takes what it has counted since the last reading with it, so faults have one taken before.
"""

from __future__ import annotations

import asyncio
import http.client
from dataclasses import dataclass, field, fields
from typing import Final

from semel.lab.bench.serving.procfs import pss_bytes
from semel.lab.prove.processes import Fleet, Node
from semel.telemetry import metrics
from semel.telemetry.scrape import Scrape

__all__ = ["Memory", "Recorder", "Work"]

_READ_S: Final = 2.0
_MEMORY_EVERY: Final = 5
_TIMEOUT_S: Final = 3.0


@dataclass(slots=True)
class Work:
    """Totals of counters."""

    fetched: float = 0
    decoded: float = 0
    preprocessed: float = 0
    sent: float = 0
    sent_bytes: float = 0
    encoded: float = 0
    loaded: float = 0
    """Encoder outputs from the embedding store or the host tier."""

    repaired: float = 0
    resubmitted: float = 0
    """Submissions that an engine lost an item of."""

    failovers: float = 0
    evicted: float = 0

    def add(self, other: Work) -> None:
        """Add another one."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


@dataclass(slots=True)
class Memory:
    """Memory of all processes of a fleet together."""

    first_bytes: int = 0
    peak_bytes: int = 0
    last_bytes: int = 0

    def note(self, nbytes: int) -> None:
        """Note a reading."""
        self.first_bytes = self.first_bytes or nbytes
        self.peak_bytes = max(self.peak_bytes, nbytes)
        self.last_bytes = nbytes


@dataclass(slots=True)
class Recorder:
    """The last readings of every process that there has been."""

    fleet: Fleet
    memory: Memory = field(default_factory=Memory)
    _readings: dict[str, Work] = field(default_factory=dict)

    async def run(self) -> None:
        """Read again and again."""
        number = 0
        while True:
            await self.read_all()
            if number % _MEMORY_EVERY == 0:
                self.memory.note(await asyncio.to_thread(self._memory))
            number += 1
            await asyncio.sleep(_READ_S)

    async def read_all(self) -> None:
        """Read the counters of all that run."""
        await asyncio.gather(*map(self.read, self.fleet.running))

    async def read(self, node: Node) -> None:
        """Read the counters of one, if it answers."""
        try:
            text = await asyncio.to_thread(node.metrics, _TIMEOUT_S)
        except (OSError, http.client.HTTPException):
            return
        self._readings[node.name] = await asyncio.to_thread(_work_of, text)

    def total(self) -> Work:
        """Return the sum of all."""
        total = Work()
        for one in self._readings.values():
            total.add(one)
        return total

    def _memory(self) -> int:
        return sum(pss_bytes(node.family()) for node in self.fleet.running)


def _work_of(text: str) -> Work:
    found = Scrape.parse(text)
    return Work(
        fetched=found.total(metrics.MEDIA_FETCHES),
        decoded=found.total(metrics.POOL_DECODED),
        preprocessed=found.total(metrics.POOL_PROCESSED),
        sent=found.total(metrics.FEATURES_SENT),
        sent_bytes=found.total(metrics.FEATURE_BYTES_SENT),
        encoded=found.total(metrics.ENCODER_PLANNED) - found.total(metrics.EMBEDDING_LOADS),
        loaded=found.total(metrics.EMBEDDING_LOADS),
        repaired=found.total(metrics.FEATURES_REPAIRED),
        resubmitted=found.total(metrics.RESUBMISSIONS),
        failovers=found.total(metrics.FAILOVERS),
        evicted=found.total(metrics.MM_CACHE_EVICTIONS),
    )
