"""Opens configurations of vLLM that a GPU has by default, on a CPU machine: for tests, never a part of semel.

Python imports a module of this name at its start, if its folder is on `PYTHONPATH`, so vLLM's child processes have it
too. Each shim waits for a module to be imported, and is switched on by a variable of the environment:

`SEMEL_SHIM_ASYNC`: vLLM's CPU platform switches asynchronous scheduling off without a word; here it stays as chosen.
`SEMEL_SHIM_TRITON`: the V2 model runner needs Triton. Triton's interpreter stands in: on a CPU, not CUDA, and slowly.
`SEMEL_SHIM_PLANTS`: a worker process can be made to err (`plants`), to show that a comparison finds it.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

Shim = Callable[[Any], None]


class _Finder(importlib.abc.MetaPathFinder):
    """Runs a shim when its module has been imported."""

    def __init__(self, shims: dict[str, Shim]) -> None:
        self._shims = shims

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        if (shim := self._shims.pop(fullname, None)) is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            shim(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def keep_async_scheduling(module: Any) -> None:
    """Of `vllm.platforms.cpu`."""
    platform = module.CpuPlatform
    check = platform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, config: Any) -> None:
        chosen = config.scheduler_config.async_scheduling
        check(cls, config)
        config.scheduler_config.async_scheduling = chosen

    platform.check_and_update_config = classmethod(check_and_update_config)


def add_triton_backend(module: Any) -> None:
    """Of `triton.backends`."""
    driver = SimpleNamespace(is_active=lambda: True)
    module.backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)


def add_plants(module: Any) -> None:
    """Of `semel.engine.vllm.plugins.worker`."""
    from plants import plant  # type: ignore[import-not-found]

    module.LazyTransferWorker.plant = plant


_SHIMS: dict[str, tuple[str, Shim]] = {
    "SEMEL_SHIM_ASYNC": ("vllm.platforms.cpu", keep_async_scheduling),
    "SEMEL_SHIM_TRITON": ("triton.backends", add_triton_backend),
    "SEMEL_SHIM_PLANTS": ("semel.engine.vllm.plugins.worker", add_plants),
}

if os.environ.get("SEMEL_SHIM_TRITON"):
    os.environ["TRITON_INTERPRET"] = "1"
if _chosen := dict(shim for name, shim in _SHIMS.items() if os.environ.get(name)):
    sys.meta_path.insert(0, _Finder(_chosen))
