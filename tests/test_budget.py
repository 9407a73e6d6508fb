"""The budget of CI: what its stages spend, that too many engines, or none counted, fail it, and what is run twice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.budget import MAX_ENGINE_STARTS, NOTES, Stage, check_starts, stages_of
from tests.engine_starts.semel_engine_starts import ENGINE_STARTS

PLUGIN = Path(__file__).parent / "engine_starts"
TESTS = Path(__file__).parents[1] / "scripts" / "tests"
STARTER = """
import importlib.metadata, multiprocessing
for plugin in importlib.metadata.entry_points(group="vllm.general_plugins"):
    if plugin.name == "semel_engine_starts":
        plugin.load()()
for name in ("EngineCore", "a worker", "EngineCore_DP1"):
    process = multiprocessing.get_context("fork").Process(target=int, name=name)
    process.start()
    process.join()
"""


def test_a_stage_spends_what_passes_until_the_next_one_begins() -> None:
    lines = ["100 0 fast tests", "160 0 first answer", "190 1 engines"]
    assert list(stages_of(lines, 490, 21)) == [
        Stage("fast tests", 1.0, 0),
        Stage("first answer", 0.5, 1),
        Stage("engines", 5.0, 20),
    ]


@pytest.mark.parametrize("starts", [0, MAX_ENGINE_STARTS + 1])
def test_too_many_engines_fail_and_so_does_a_count_that_counts_nothing(starts: int) -> None:
    check_starts(MAX_ENGINE_STARTS)
    with pytest.raises(AssertionError, match=r"counted|budget"):
        check_starts(starts)


@pytest.mark.parametrize("is_counted", [True, False])
def test_engine_cores_are_counted_in_whatever_process_starts_them(tmp_path: Path, is_counted: bool) -> None:
    file = tmp_path / "starts"
    environment = {name: value for name, value in os.environ.items() if name != ENGINE_STARTS}
    environment |= {"PYTHONPATH": str(PLUGIN)} | ({ENGINE_STARTS: str(file)} if is_counted else {})
    subprocess.run([sys.executable, "-c", STARTER], env=environment, check=True, timeout=60)
    assert file.exists() == is_counted
    if is_counted:
        assert len(file.read_text().splitlines()) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failing", "failures", "is_ci", "is_passed"),
    [(1, 1, True, True), (3, 1, True, True), (1, 2, True, False), (4, 1, True, False), (1, 1, False, False)],
)
def test_in_ci_a_few_tests_that_fail_once_are_run_again_and_named(
    tmp_path: Path, failing: int, failures: int, is_ci: bool, is_passed: bool
) -> None:
    """What fails twice, or many at once, fails CI; so does anything outside of it."""
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "test_it.py").write_text(f"""
import pathlib, pytest

@pytest.mark.parametrize("number", range(6))
def test_it(number):
    runs = pathlib.Path(f"runs-{{number}}")
    runs.write_text((runs.read_text() if runs.exists() else "") + "x")
    assert number >= {failing} or len(runs.read_text()) > {failures}
""")
    environment = {name: value for name, value in os.environ.items() if name != NOTES}
    environment |= {NOTES: str(tmp_path)} if is_ci else {}
    command = [str(TESTS), "-q"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, timeout=60, capture_output=True, text=True)
    assert (ended.returncode == 0) == is_passed, ended.stdout
    again = (tmp_path / "again").read_text().split() if (tmp_path / "again").exists() else []
    expected = [f"test_it.py::test_it[{number}]" for number in range(failing)]
    assert again == (expected if is_ci and failing <= 3 else [])
    runs = [len((tmp_path / f"runs-{number}").read_text()) for number in range(6)]
    assert runs == [2 if again else 1] * 6, "the whole file: a test that fails because of another one fails again"
