"""The layers of design.md, the public surface, and what a process may import."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import semel

SOURCE = Path(semel.__file__).parent
LAYERS = (
    "errors",
    "core",
    "sizing",
    "telemetry",
    "web",
    "encoder",
    "cache",
    "ledger",
    "media",
    "wire",
    "interchange",
    "client",
    "processing",
    "render",
    "engine",
    "fleet",
    "frontend",
    "worker",
    "testing",
    "bench",
    "settings",
    "shutdown",
    "compose",
    "cli",
    "__main__",
)
"""From the bottom up: a layer may import itself and what stands before it."""


def layer_of(module: str) -> str:
    return module.removeprefix("semel.").partition(".")[0]


def modules() -> list[str]:
    return [info.name for info in pkgutil.walk_packages([str(SOURCE)], "semel.")]


def imports_of(module: str) -> Iterator[str]:
    path = SOURCE.parent / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively; write the full name"
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("module", modules())
def test_imports_point_down(module: str) -> None:
    height = LAYERS.index(layer_of(module))
    for name in imports_of(module):
        if name.startswith("semel."):
            assert LAYERS.index(layer_of(name)) <= height, f"{module} imports {name}, which is above it"
        assert name != "semel", f"{module} imports the package itself; name the module"


@pytest.mark.parametrize("module", [name for name in modules() if layer_of(name) == "worker"])
def test_a_worker_imports_nothing_of_a_frontend(module: str) -> None:
    assert not [name for name in imports_of(module) if name.startswith("semel.frontend")]


@pytest.mark.parametrize("module", [name for name in modules() if layer_of(name) not in {"bench", "engine"}])
def test_only_the_engine_and_what_compares_with_it_know_vllm(module: str) -> None:
    assert not [name for name in imports_of(module) if name.partition(".")[0] == "vllm"]


@pytest.mark.parametrize("module", ["semel", *modules()])
def test_the_public_surface_is_sorted_and_complete(module: str) -> None:
    loaded = importlib.import_module(module)
    names = getattr(loaded, "__all__", [])
    assert names == sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    assert set(names) <= set(dir(loaded))
    own = {name for name, value in vars(loaded).items() if getattr(value, "__module__", None) == module}
    public = {name for name in own if not name.startswith("_") and not hasattr(loaded, "__path__")}
    assert public <= set(names) or layer_of(module) == "cli", f"{module} does not list {public - set(names)}"


@pytest.mark.parametrize(
    "imported",
    [
        "semel",
        "semel.render",
        "semel.processing.families",
        "semel.processing.pool.pool",
        "semel.frontend.app",
        "semel.fleet.worker",
        "semel.cli",
        "semel.testing.models",
    ],
)
def test_what_a_serving_process_imports_brings_neither_torch_nor_transformers_nor_vllm(imported: str) -> None:
    program = f"import sys, {imported}; print(*sorted(m for m in sys.modules if '.' not in m))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert not {"torch", "torchvision", "transformers", "vllm"} & set(done.stdout.split())
