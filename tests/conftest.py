"""Tiny models for all tests, and an environment in which nothing is fetched."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.budget import engine_budget, pytest_terminal_summary
from tests.effort import FACTOR
from tests.groups import pytest_collection_modifyitems, pytest_xdist_make_scheduler

__all__ = [
    "engine_budget",
    "pytest_collection_modifyitems",
    "pytest_terminal_summary",
    "pytest_xdist_make_scheduler",
    "tiny",
]

# Read by transformers and vLLM when they are imported, here and in every process that a test starts.
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}

# Engines that run at the same time have a core each.
if (number := os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")).isdigit():
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(int(number) % (os.cpu_count() or 1))

# How long an example takes says how busy the machine is, no more.
timeless = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("semel", timeless, max_examples=20 * FACTOR)
settings.load_profile("semel")

Folder = Callable[[str], Path]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The folder of a tiny model, built once per session: `tiny("qwen2-vl")`."""
    from semel.testing.models import build

    built: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in built:
            built[family] = build(family, tmp_path_factory.mktemp("models") / family)
        return built[family]

    return folder
