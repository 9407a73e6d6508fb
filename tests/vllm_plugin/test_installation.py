"""The cost of an installed semel in a process of vLLM. `scripts/resolve` shows that pip changes no other package."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from importlib.metadata import entry_points

PROGRAM = """
import json, os, sys, time
from importlib.metadata import entry_points
(entry,) = entry_points(group="vllm.general_plugins", name="semel")
before, began = {*sys.modules}, time.process_time()
entry.load()()
print(json.dumps([time.process_time() - began, sorted({*sys.modules} - before)]))
"""
MAX_CPU_S = 0.05


def cost(**environment: str) -> tuple[float, set[str]]:
    """The median CPU seconds of loading and calling the entry point in a new process, and the modules it brings."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("SEMEL", "_SEMEL"))}
    found = []
    for _ in range(5):
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=ours | environment)
        assert bool(done.stderr) == bool(environment)
        found.append(json.loads(done.stdout))
    return statistics.median(seconds for seconds, _ in found), {*found[0][1]}


def test_vllm_finds_the_entry_point_by_its_name() -> None:
    (entry,) = entry_points(group="vllm.general_plugins", name="semel")
    assert entry.value == "semel.vllm_plugin:register"
    # Never this group: whatever is in it switches vLLM's own statistics.
    assert not [entry for entry in entry_points(group="vllm.stat_logger_plugins") if "semel" in entry.value]


def test_without_semel_the_entry_point_imports_two_modules_and_takes_under_50_ms_of_cpu() -> None:
    seconds, modules = cost()
    assert {name for name in modules if name.startswith("semel")} == {"semel", "semel.vllm_plugin"}
    assert len(modules) <= 4, modules
    assert seconds < MAX_CPU_S


def test_with_semel_the_levels_are_imported() -> None:
    """The control, with a word that shuts the door before vLLM's source is read."""
    _, modules = cost(SEMEL="no-level")
    assert "semel.vllm_plugin.levels" in modules
