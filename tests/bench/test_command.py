"""`semel bench`, as a script runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from semel.lab.bench.report import Check
from tests.bench.limits import assert_limits


@pytest.mark.alone
@pytest.mark.engine
@pytest.mark.timeout(200)
def test_json_is_one_object_the_limits_are_kept_and_the_exit_code_says_so_A2_A5_B5(tmp_path: Path) -> None:
    semel, plot = Path(sys.executable).parent / "semel", tmp_path / "figures.png"
    command = [str(semel), "bench", "encoder", "--quick", "--json", "--plot", str(plot)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    report = json.loads(done.stdout)
    assert report.keys() == {"bench", "machine", "checks"}
    assert len(report["checks"]) >= 12
    assert done.returncode == int(not all(check["ok"] for check in report["checks"]))
    assert_limits([Check(**check) for check in report["checks"]], slack=1.5)  # fewer rounds, and a busy machine
    assert plot.read_bytes().startswith(b"\x89PNG")
