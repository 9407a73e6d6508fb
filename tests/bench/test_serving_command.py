"""`semel bench serve`, as a script runs it: both servers are started, asked in turns, and ended."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.commands import run_main

SEMEL = Path(sys.executable).parent / "semel"
WITHIN_S = 900


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.alone
@pytest.mark.timeout(WITHIN_S + 60)
def test_both_sides_are_measured_drawn_and_ended(tmp_path: Path) -> None:
    # R: two frontends ship no tensor on a repeat; vLLM with two API servers, the control, ships all of it.
    command = [str(SEMEL), "bench", "serve", "--quick", "--json", "--plot", str(tmp_path / "plots")]
    command += ["--only", "text", "--only", "generate", "--only", "frontends"]
    home = Path(tempfile.mkdtemp(prefix="semel-"))  # pytest's own is too long a path for the sockets in it
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(home)}
    )
    try:
        told, progress = process.communicate(timeout=WITHIN_S)
    finally:
        _end(process)
    assert process.returncode == 0, progress[-3_000:]
    report = json.loads(told)
    rows = {row["name"]: row for row in report["rows"]}
    assert rows["text: latency"]["semel"]["count"] == rows["text: latency"]["vllm"]["count"] >= 40
    tensors = rows["frontends: tensor bytes between processes, per repeat"]
    assert tensors["semel"]["value"] == 0
    assert tensors["vllm"]["value"] > 6_000_000
    body = rows["generate: body, next to vLLM's with tensors"]
    assert body["semel"]["value"] <= 8_192 < 6_000_000 < body["vllm"]["value"]
    assert report["run"]["flags"]
    assert (tmp_path / "plots" / "limits.png").exists()
    assert "repeats, two frontends" in progress
    left = [path.name for path in home.iterdir() if path.name != f"torchinductor_{getpass.getuser()}"]
    shutil.rmtree(home)
    assert not left


def _end(process: subprocess.Popen[str]) -> None:
    """By now it has ended; if not, all that came of it does."""
    if process.poll() is not None:
        return
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    finally:
        for one in family:
            if one.is_running():
                one.kill()
        process.kill()
        process.wait(5)


def test_a_checkout_that_is_not_installed_is_refused(tmp_path: Path) -> None:
    code, said = run_main("bench", "serve", "--semel-source", str(tmp_path))
    assert (code, "run scripts/install there" in said) == (2, True)


def test_a_scenario_that_there_is_not_is_named_before_anything_starts() -> None:
    code, said = run_main("bench", "serve", "--only", "nothing")
    assert (code, "there is no such scenario" in said) == (2, True)
