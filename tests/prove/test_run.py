"""`semel prove` without engines: real processes under fire answer everything; the controls are in test_mix (D3)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(400)]

DEADLINE_S = 180


def prove(home: Path, *flags: object) -> tuple[int, dict[str, Any]]:
    """The exit code and the page of a run; as the command writes it."""
    page = home / "page"
    common = [
        "--modelless",
        "--seed",
        1,
        "--fault-interval-s",
        2,
        "--references",
        home / "references",
        "--report",
        page,
    ]
    words = [sys.executable, "-m", "semel", "prove", *common, *flags]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode in (0, 1), done.stderr[-3_000:]
    return done.returncode, json.loads(page.with_suffix(".json").read_text())


def wrong(page: dict[str, Any]) -> list[str]:
    return [check["name"] for check in page["checks"] if not check["ok"]]


def test_nothing_is_lost_and_nothing_is_wrong_under_fire(tmp_path: Path) -> None:
    code, page = prove(tmp_path, "--requests", 2_000)
    assert (code, wrong(page), page["wrong"]) == (0, [], [])
    assert sum(page["outcomes"].values()) == 2_000
    assert page["ties"] == 0
    assert sum(page["faults"].values()) >= 5, page["faults"]
    assert page["work"]["resubmitted"] > 0, "no item was lost, so nothing was repaired"
