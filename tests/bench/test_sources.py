"""`semel bench serve --semel-source`: a change of a few percent of CPU per request is found, no change is none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import semel

MIDDLEWARE = "frontend/middleware/request_context.py"
CALL = "    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:\n"
LOOP = """\
        _until = __import__("time").thread_time() + {}
        while __import__("time").thread_time() < _until:
            pass
"""
PLANTED_S = 0.00025
"""About 3% of the serving CPU of a text here."""


def checkout(folder: Path, *, planted_s: float = 0.0) -> Path:
    """Make another checkout, with a loop in the way of each request if there is to be one."""
    source = folder / "src" / "semel"
    shutil.copytree(Path(semel.__file__).parent, source, ignore=shutil.ignore_patterns("__pycache__"))
    if planted_s:
        text = (source / MIDDLEWARE).read_text()
        assert CALL in text
        (source / MIDDLEWARE).write_text(text.replace(CALL, CALL + LOOP.format(planted_s)))
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder / "src"}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return folder


def compare(folder: Path) -> dict[str, Any]:
    """Run the command on a checkout; the rows by name."""
    command = [sys.executable, "-m", "semel", "bench", "serve", "--semel-source", str(folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | {"COLUMNS": "120"})
    assert done.returncode == 0, done.stderr[-2_000:]
    return {row["name"]: row for row in json.loads(done.stdout.splitlines()[-1])["rows"]}


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.alone
@pytest.mark.timeout(1_300)
def test_three_percent_of_cpu_per_request_are_found_within_ten_minutes(tmp_path: Path) -> None:
    slower = compare(checkout(tmp_path / "slower", planted_s=PLANTED_S))["sources: serving CPU of a text"]
    assert slower["ratio"]["high"] < 1.0, slower
    same = compare(checkout(tmp_path / "same"))["sources: serving CPU of a text"]
    assert same["ratio"]["low"] < 1.0 < same["ratio"]["high"] or abs(same["ratio"]["value"] - 1) < 0.01, same


def test_a_folder_without_an_installation_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "semel", "bench", "serve", "--semel-source", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode
    assert "run scripts/install there" in done.stderr
