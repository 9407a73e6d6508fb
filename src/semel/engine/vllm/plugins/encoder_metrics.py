"""The encoder's totals, from inside the engine core to the process that embeds it.

vLLM gives an encoder cache in its engine core no channel to the embedding process, so this is a page of shared memory
with one row per engine core: the core writes, any process reads, nobody waits. A row has a version in front, odd while
it is written, so a reader never sees half of an update.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from typing import Final

from semel.engine.vllm.tier.shared_file import SharedPage
from semel.telemetry import metrics
from semel.telemetry.meter import Sample

__all__ = ["EncoderPage", "EncoderTotals"]

_ROWS: Final = 64
_COLUMNS: Final = 32
_BYTES: Final = 8 * _ROWS * _COLUMNS


@dataclass(frozen=True, slots=True)
class EncoderTotals:
    """Running totals of the encoder cache of one engine core, and how full it is: `samples` names the metrics."""

    queries: int = 0
    hits: int = 0
    evictions: int = 0
    capacity: int = 0
    resident: int = 0
    reclaimable: int = 0
    planned: int = 0
    cut: int = 0
    taken_over: int = 0
    planning_ns: int = 0
    left_out_bytes: int = 0
    late_bytes: int = 0
    rejected: int = 0
    tier_loads: int = 0
    tier_load_bytes: int = 0
    tier_load_ns: int = 0
    tier_saves: int = 0
    tier_save_bytes: int = 0
    tier_save_ns: int = 0
    tier_not_saved: int = 0
    tier_evictions: int = 0
    tier_capacity_bytes: int = 0
    tier_held_bytes: int = 0
    tier_pinned_bytes: int = 0
    tier_prefetched: int = 0
    tier_prefetched_bytes: int = 0
    tier_prefetched_ns: int = 0
    following_ns: int = 0
    following_ended: int = 0
    following_abandoned: int = 0
    not_finite: int = 0


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
            for metric, value in (
                (metrics.ENCODER_CACHE_QUERIES, totals.queries),
                (metrics.ENCODER_CACHE_HITS, totals.hits),
                (metrics.ENCODER_CACHE_EVICTIONS, totals.evictions),
                (metrics.ENCODER_CACHE_CAPACITY, totals.capacity),
                (metrics.ENCODER_CACHE_RESIDENT, totals.resident),
                (metrics.ENCODER_CACHE_RECLAIMABLE, totals.reclaimable),
                (metrics.ENCODER_PLANNED, totals.planned),
                (metrics.ENCODER_CUT, totals.cut),
                (metrics.ENCODER_TAKEN_OVER, totals.taken_over),
                (metrics.ENCODER_PLANNING_SECONDS, totals.planning_ns / 1e9),
                (metrics.ENCODER_LEFT_OUT_BYTES, totals.left_out_bytes),
                (metrics.ENCODER_LATE_BYTES, totals.late_bytes),
                (metrics.ENCODER_REJECTED, totals.rejected),
                (metrics.ENCODER_NOT_FINITE, totals.not_finite),
                (metrics.GRAMMAR_FOLLOWING_SECONDS, totals.following_ns / 1e9),
                (metrics.GRAMMAR_ENDED, totals.following_ended),
                (metrics.GRAMMAR_ABANDONED, totals.following_abandoned),
                (metrics.EMBEDDING_SAVES, totals.tier_saves),
                (metrics.EMBEDDING_SAVE_BYTES, totals.tier_save_bytes),
                (metrics.EMBEDDING_SAVE_SECONDS, totals.tier_save_ns / 1e9),
                (metrics.EMBEDDING_NOT_SAVED, totals.tier_not_saved),
                (metrics.EMBEDDING_EVICTIONS, totals.tier_evictions),
                (metrics.EMBEDDING_CAPACITY, totals.tier_capacity_bytes),
                (metrics.EMBEDDING_BYTES, totals.tier_held_bytes),
                (metrics.EMBEDDING_PINNED, totals.tier_pinned_bytes),
            ):
                yield metric, value, (str(row),)
            for metric, tier, value in (
                (metrics.EMBEDDING_LOADS, "host", totals.tier_loads),
                (metrics.EMBEDDING_LOADS, "fleet", totals.tier_prefetched),
                (metrics.EMBEDDING_LOAD_BYTES, "host", totals.tier_load_bytes),
                (metrics.EMBEDDING_LOAD_BYTES, "fleet", totals.tier_prefetched_bytes),
                (metrics.EMBEDDING_LOAD_SECONDS, "host", totals.tier_load_ns / 1e9),
                (metrics.EMBEDDING_LOAD_SECONDS, "fleet", totals.tier_prefetched_ns / 1e9),
            ):
                yield metric, value, (str(row), tier)

    def _read_row(self, start: int) -> EncoderTotals | None:
        for _ in range(1_000):
            version = self._cells[start]
            values = self._cells[start + 1 : start + 1 + len(fields(EncoderTotals))].tolist()
            if version % 2 == 0 and self._cells[start] == version:
                return EncoderTotals(*values)
        return None  # a writer that died in the middle of an update
