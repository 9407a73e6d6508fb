"""`semel bench`, as a script runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.alone
@pytest.mark.engine
@pytest.mark.timeout(200)
def test_json_is_one_object_and_the_exit_code_tells_whether_all_checks_are_ok(tmp_path: Path) -> None:
    semel, plot = Path(sys.executable).parent / "semel", tmp_path / "figures.png"
    command = [str(semel), "bench", "encoder", "--quick", "--json", "--plot", str(plot)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    report = json.loads(done.stdout)
    assert report.keys() == {"bench", "machine", "checks"}
    assert len(report["checks"]) >= 12
    assert done.returncode == int(not all(check["ok"] for check in report["checks"]))
    assert plot.read_bytes().startswith(b"\x89PNG")
