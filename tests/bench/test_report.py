"""The one shape of benchmarks."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from semel.lab.bench.report import Check, Report, describe_machine

REPORT = Report(
    "sample",
    {"cores": 2},
    (
        Check.at_least("faster", 12.0, 10, unit="×", baseline=1.0),
        Check.at_most("memory", 5.0, 4, unit="MB"),
        Check("seen", 3.0, "items"),
    ),
)


def test_a_report_is_one_object_of_the_documented_shape() -> None:
    assert json.loads(REPORT.to_json()) == {
        "bench": "sample",
        "machine": {"cores": 2},
        "checks": [
            {"name": "faster", "value": 12.0, "unit": "×", "baseline": 1.0, "limit": 10, "ok": True},
            {"name": "memory", "value": 5.0, "unit": "MB", "baseline": None, "limit": 4, "ok": False},
            {"name": "seen", "value": 3.0, "unit": "items", "baseline": None, "limit": None, "ok": True},
        ],
    }


def test_a_report_fails_with_its_checks() -> None:
    assert not REPORT.ok
    assert Report("sample", {}, REPORT.checks[:1]).ok


def test_a_table_shows_every_check() -> None:
    console = Console(file=io.StringIO(), width=120)
    REPORT.print_table(console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert all(check.name in text for check in REPORT.checks)
    assert text.count("not ok") == 1


def test_a_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    REPORT.plot(tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_the_machine_says_what_a_reader_needs() -> None:
    assert {"cores", "memory_gb", "python", "system"} <= describe_machine().keys()
