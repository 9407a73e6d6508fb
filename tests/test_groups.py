"""Tests that share an engine follow one another in one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.groups import FAMILIES, SHARED, group_of

ROOT = Path(__file__).parent.parent
TESTS = """
import os, pytest
@pytest.mark.parametrize("rig", ["qwen2-vl", "whisper: a", "qwen2-vl images", "whisper"])
def test_rows(rig):
    with open("{log}", "a") as file:
        file.write(f"{{rig.partition(' ')[0].strip(':')}} {{os.getpid()}}\\n")
"""


@pytest.mark.parametrize(
    ("test", "group"),
    [
        *((f"{file}::test_a[qwen2-vl: a pixel too few]", "qwen2-vl") for file in FAMILIES),
        (f"{FAMILIES[0]}::test_a[whisper]", "whisper"),
        (f"{FAMILIES[0]}::test_a[qwen2.5-vl images-hf]", "qwen2.5-vl"),
        (f"{FAMILIES[0]}::test_a", FAMILIES[0]),
        ("tests/engine/test_transcriptions.py::test_a[{}]", "whisper"),
        ("tests/core/test_digest.py::test_a[whisper]", "tests/core/test_digest.py"),
    ],
)
def test_a_group_is_a_file_or_those_that_share_an_engine(test: str, group: str) -> None:
    assert group_of(test) == group


def test_every_file_that_shares_is_there() -> None:
    assert all((ROOT / file).exists() for file in (*FAMILIES, *SHARED))


def test_one_process_runs_all_of_a_group(tmp_path: Path) -> None:
    """In a session of its own, whose only file has the name of the families' one."""
    file, log = tmp_path / FAMILIES[0], tmp_path / "log"
    file.parent.mkdir(parents=True)
    file.write_text(TESTS.format(log=log))
    (tmp_path / "conftest.py").write_text("from tests.groups import pytest_xdist_make_scheduler\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", f"--rootdir={tmp_path}", "-n", "2"]
    done = subprocess.run(
        [*command, "--dist=loadfile", str(file)],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ran = {tuple(line.split()) for line in log.read_text().splitlines()}
    assert len(ran) == 2, "each family in one process"
    assert len({process for _, process in ran}) == 2, "and not all of the file in the same"
