"""The encoder's totals, from inside the engine core to the process that embeds it.

vLLM gives an encoder cache in its engine core no channel to the embedding process, so this is a page of shared memory
with one row per engine core: the core writes, any process reads, nobody waits. A row has a version in front, odd while
it is written, so a reader never sees half of an update.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, field, fields
from typing import Any, Final

from semel.engine.vllm.tier.shared_file import SharedPage
from semel.telemetry import metrics
from semel.telemetry.meter import Metric, Sample

__all__ = ["EncoderPage", "EncoderTotals"]

_ROWS: Final = 64
_COLUMNS: Final = 32
_BYTES: Final = 8 * _ROWS * _COLUMNS


def _sample(metric: Metric, *tier: str) -> dict[str, Any]:
    return {"metric": metric, "tier": tier}


@dataclass(frozen=True, slots=True)
class EncoderTotals:
    """Running totals of the encoder cache of one engine core, and how full it is, each with its metric."""

    queries: int = field(default=0, metadata=_sample(metrics.ENCODER_CACHE_QUERIES))
    hits: int = field(default=0, metadata=_sample(metrics.ENCODER_CACHE_HITS))
    evictions: int = field(default=0, metadata=_sample(metrics.ENCODER_CACHE_EVICTIONS))
    capacity: int = field(default=0, metadata=_sample(metrics.ENCODER_CACHE_CAPACITY))
    resident: int = field(default=0, metadata=_sample(metrics.ENCODER_CACHE_RESIDENT))
    reclaimable: int = field(default=0, metadata=_sample(metrics.ENCODER_CACHE_RECLAIMABLE))
    planned: int = field(default=0, metadata=_sample(metrics.ENCODER_PLANNED))
    cut: int = field(default=0, metadata=_sample(metrics.ENCODER_CUT))
    taken_over: int = field(default=0, metadata=_sample(metrics.ENCODER_TAKEN_OVER))
    planning_ns: int = field(default=0, metadata=_sample(metrics.ENCODER_PLANNING_SECONDS))
    left_out_bytes: int = field(default=0, metadata=_sample(metrics.ENCODER_LEFT_OUT_BYTES))
    late_bytes: int = field(default=0, metadata=_sample(metrics.ENCODER_LATE_BYTES))
    rejected: int = field(default=0, metadata=_sample(metrics.ENCODER_REJECTED))
    tier_loads: int = field(default=0, metadata=_sample(metrics.EMBEDDING_LOADS, "host"))
    tier_load_bytes: int = field(default=0, metadata=_sample(metrics.EMBEDDING_LOAD_BYTES, "host"))
    tier_load_ns: int = field(default=0, metadata=_sample(metrics.EMBEDDING_LOAD_SECONDS, "host"))
    tier_saves: int = field(default=0, metadata=_sample(metrics.EMBEDDING_SAVES))
    tier_save_bytes: int = field(default=0, metadata=_sample(metrics.EMBEDDING_SAVE_BYTES))
    tier_save_ns: int = field(default=0, metadata=_sample(metrics.EMBEDDING_SAVE_SECONDS))
    tier_not_saved: int = field(default=0, metadata=_sample(metrics.EMBEDDING_NOT_SAVED))
    tier_evictions: int = field(default=0, metadata=_sample(metrics.EMBEDDING_EVICTIONS))
    tier_capacity_bytes: int = field(default=0, metadata=_sample(metrics.EMBEDDING_CAPACITY))
    tier_held_bytes: int = field(default=0, metadata=_sample(metrics.EMBEDDING_BYTES))
    tier_pinned_bytes: int = field(default=0, metadata=_sample(metrics.EMBEDDING_PINNED))
    tier_prefetched: int = field(default=0, metadata=_sample(metrics.EMBEDDING_LOADS, "fleet"))
    tier_prefetched_bytes: int = field(default=0, metadata=_sample(metrics.EMBEDDING_LOAD_BYTES, "fleet"))
    tier_prefetched_ns: int = field(default=0, metadata=_sample(metrics.EMBEDDING_LOAD_SECONDS, "fleet"))
    following_ns: int = field(default=0, metadata=_sample(metrics.GRAMMAR_FOLLOWING_SECONDS))
    following_ended: int = field(default=0, metadata=_sample(metrics.GRAMMAR_ENDED))
    following_abandoned: int = field(default=0, metadata=_sample(metrics.GRAMMAR_ABANDONED))
    not_finite: int = field(default=0, metadata=_sample(metrics.ENCODER_NOT_FINITE))


assert len(fields(EncoderTotals)) < _COLUMNS, "the first cell of a row is its version"


class EncoderPage(SharedPage):
    """The rows of all engine cores of one embedding process."""

    file_name = "semel-encoder-metrics"
    purpose = "the encoder's metrics"
    nbytes = _BYTES

    def write(self, row: int, totals: EncoderTotals) -> None:
        """Replace a row. One process writes a row; rows past the page are not kept."""
        if row >= _ROWS:
            return
        start = row * _COLUMNS
        self._cells[start] += 1
        for column, value in enumerate(astuple(totals), start + 1):
            self._cells[column] = value
        self._cells[start] += 1

    def read(self) -> dict[int, EncoderTotals]:
        """Return the totals of every engine core that has written, by its row."""
        rows = {row: self._read_row(row * _COLUMNS) for row in range(_ROWS) if self._cells[row * _COLUMNS]}
        return {row: totals for row, totals in rows.items() if totals is not None}

    def samples(self) -> Iterator[Sample]:
        """Yield the totals as metrics, for `Meter.watch`."""
        for row, totals in self.read().items():
            for one in fields(totals):
                total = getattr(totals, one.name)
                value = total / 1e9 if one.name.split("_")[-1] == "ns" else total  # metrics have seconds
                yield one.metadata["metric"], value, (str(row), *one.metadata["tier"])

    def _read_row(self, start: int) -> EncoderTotals | None:
        for _ in range(1_000):
            version = self._cells[start]
            values = self._cells[start + 1 : start + 1 + len(fields(EncoderTotals))].tolist()
            if version % 2 == 0 and self._cells[start] == version:
                return EncoderTotals(*values)
        return None  # a writer that died in the middle of an update
