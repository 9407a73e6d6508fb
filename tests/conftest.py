"""Tiny models for all tests, and an environment in which nothing is fetched."""

from __future__ import annotations

import ast
import gc
import os
import ssl
from collections.abc import AsyncIterator, Callable
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from httpx._transports import default
from hypothesis import HealthCheck, settings

from tests.budget import engine_budget, pytest_terminal_summary
from tests.effort import FACTOR
from tests.groups import pytest_collection_modifyitems, pytest_xdist_make_scheduler
from tests.markers import pytest_ignore_collect, pytest_itemcollected

if TYPE_CHECKING:
    from tests.engine.engines import Engines

__all__ = [
    "engine_budget",
    "engines",
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_ignore_collect",
    "pytest_itemcollected",
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


@cache
def _trusted() -> ssl.SSLContext:
    return httpx.create_ssl_context()


def _ssl_context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
    """Read the certificates of the system once, and not for each of httpx' clients, which takes 50 ms."""
    return _trusted() if verify is True and cert is None else httpx.create_ssl_context(verify, cert, trust_env)


default.create_ssl_context = _ssl_context  # type: ignore[attr-defined]


@wraps(ast.parse)
def _parse(*args: Any, **kwargs: Any) -> Any:
    """Parse without garbage collection: one may log a traceback, and parse, which 3.11 cannot do in between."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        return _parse.__wrapped__(*args, **kwargs)
    finally:
        if was_on:
            gc.enable()


ast.parse = _parse

Folder = Callable[[str], Path]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Take what all tests share out of every later garbage collection.

    Not with engines: vLLM is imported later, and the less is known as long-lived, the more often all of it is walked.
    """
    if not any(item.get_closest_marker("engine") for item in session.items):
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The folder of a tiny model, built once per session: `tiny("qwen2-vl")`."""
    from semel.lab.testing.models import build

    built: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in built:
            built[family] = build(family, tmp_path_factory.mktemp("models") / family)
        return built[family]

    return folder


@pytest.fixture(scope="session")
async def engines(tiny: Folder) -> AsyncIterator[Engines]:
    """The engine that runs, and how to get another one."""
    from tests.engine.engines import Engines

    shared = Engines(tiny)
    yield shared
    await shared.close()
