"""The budget of CI: what its stages spend, and that too many engines, or none counted, fail it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.budget import MAX_ENGINE_STARTS, check_starts
from tests.engine_starts.semel_engine_starts import ENGINE_STARTS

PLUGIN = Path(__file__).parent / "engine_starts"
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
