"""The page between an engine core and the process that embeds it. No engine, no vLLM."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from semel.engine.vllm.plugins.encoder_metrics import EncoderPage, EncoderTotals
from semel.errors import ConfigError
from semel.telemetry import METRICS, Meter

TOTALS = EncoderTotals(
    queries=9,
    hits=5,
    evictions=2,
    capacity=80,
    resident=60,
    reclaimable=20,
    planned=4,
    cut=3,
    taken_over=6,
    planning_ns=1_500_000,
    left_out_bytes=700,
    late_bytes=300,
    rejected=8,
    tier_loads=11,
    tier_load_bytes=12,
    tier_load_ns=1_300_000,
    tier_saves=14,
    tier_save_bytes=15,
    tier_save_ns=1_600_000,
    tier_not_saved=17,
    tier_evictions=18,
    tier_capacity_bytes=19,
    tier_held_bytes=21,
    tier_pinned_bytes=22,
    tier_prefetched=23,
    tier_prefetched_bytes=24,
    tier_prefetched_ns=2_500_000,
    following_ns=2_600_000,
    following_ended=27,
    following_abandoned=28,
    not_finite=29,
)


def test_a_page_without_a_name_is_written_by_another_process() -> None:
    page = EncoderPage.create()
    program = (
        "import sys; from semel.engine.vllm.plugins.encoder_metrics import *; "
        "EncoderPage.open(sys.argv[1]).write(3, EncoderTotals(queries=7))"
    )
    subprocess.run([sys.executable, "-c", program, page.path], check=True, timeout=60)
    assert page.read() == {3: EncoderTotals(queries=7)}
    page.close()


def test_a_page_with_a_name_is_made_where_it_is_not_there(tmp_path: Path) -> None:
    path = str(tmp_path / "totals")
    writer, reader = EncoderPage.open(path), EncoderPage.open(path)
    writer.write(0, TOTALS)
    writer.write(0, TOTALS)
    assert reader.read() == {0: TOTALS}
    writer.close()
    reader.close()


def test_every_total_is_shown_under_its_own_name() -> None:
    page = EncoderPage.create()
    page.write(2, TOTALS)
    assert [value for _, value, _ in page.samples()] == [
        *(9, 5, 2, 80, 60, 20, 4, 3, 6, 0.0015, 700, 300, 8, 11, 12, 0.0013),
        *(14, 15, 0.0016, 17, 18, 19, 21, 22, 23, 24, 0.0025, 0.0026, 27, 28, 29),
    ]
    shown = {(metric.name, labels): value for metric, value, labels in page.samples()}
    assert len(shown) == len(fields(TOTALS))
    assert (
        shown.items()
        >= {
            ("semel_encoder_cache_queries_total", ("2",)): 9,
            ("semel_encoder_cache_hits_total", ("2",)): 5,
            ("semel_embedding_loads_total", ("2", "host")): 11,
            ("semel_embedding_loads_total", ("2", "fleet")): 23,
            ("semel_embedding_load_bytes_total", ("2", "host")): 12,
            ("semel_embedding_load_bytes_total", ("2", "fleet")): 24,
            ("semel_embedding_load_seconds_total", ("2", "host")): 0.0013,
            ("semel_embedding_load_seconds_total", ("2", "fleet")): 0.0025,
            ("semel_embedding_saves_total", ("2",)): 14,
            ("semel_embedding_capacity_bytes", ("2",)): 19,
            ("semel_embedding_pinned_bytes", ("2",)): 22,
        }.items()
    )
    page.close()


def test_a_row_past_the_page_is_not_kept() -> None:
    page = EncoderPage.create()
    page.write(10_000, TOTALS)
    assert page.read() == {}
    page.close()


def test_a_half_written_row_is_not_shown() -> None:
    page = EncoderPage.create()
    page.write(0, TOTALS)
    page._cells[0] += 1
    assert page.read() == {}
    page.close()


def test_a_file_that_cannot_be_opened_is_the_operators_fault(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot open .*/missing/totals"):
        EncoderPage.open(str(tmp_path / "missing" / "totals"))


def test_every_total_is_a_metric() -> None:
    page = EncoderPage.create()
    page.write(0, TOTALS)
    meter = Meter()
    meter.watch(page.samples)
    text = meter.render().decode()
    assert 'semel_encoder_cache_hits_total{engine="0"} 5.0' in text
    assert 'semel_encoder_planning_seconds_total{engine="0"} 0.0015' in text
    names = ("semel_encoder_", "semel_embedding_", "semel_grammar_")
    encoder = {metric for metric in METRICS if metric.name.startswith(names) and "engine" in metric.labels}
    assert {metric for metric, _, _ in page.samples()} == encoder
    page.close()
