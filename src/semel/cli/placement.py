"""The GPUs, or the cores, of each worker of one machine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Final

from semel.cli.checks.engine_flags import EngineFlags
from semel.cli.checks.host import engine_ranks, gpu_memory
from semel.engine.vllm.compat.internals import CORE_BINDING
from semel.engine.vllm.compat.versions import is_cpu_build
from semel.errors import ConfigError

__all__ = ["placements", "split"]

_DEVICES: Final = "CUDA_VISIBLE_DEVICES"


def placements(workers: int, flags: EngineFlags) -> list[Mapping[str, str]]:
    """Return the environment of each worker, so that no two use the same device."""
    if workers == 1:
        return [{}]
    ranks = engine_ranks(flags)
    if is_cpu_build():
        return _cores(workers, ranks)
    return [{_DEVICES: ",".join(share)} for share in _gpus(workers, ranks)]


def split(things: Sequence[str], shares: int) -> list[Sequence[str]]:
    """Split things in order into equal shares; the first have one more if it does not come out even."""
    size, more = divmod(len(things), shares)
    ends = [(number + 1) * size + min(number + 1, more) for number in range(shares)]
    return [things[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def _gpus(workers: int, ranks: int) -> list[Sequence[str]]:
    named = os.environ.get(_DEVICES)
    devices = [one.strip() for one in named.split(",") if one.strip()] if named is not None else _all_gpus()
    if len(devices) < workers * ranks:
        raise ConfigError(
            f"--workers {workers} need {workers * ranks} GPUs ({ranks} each), and there are {len(devices)}; "
            f"start fewer, or name them in {_DEVICES}"
        )
    return [devices[number * ranks : (number + 1) * ranks] for number in range(workers)]


def _all_gpus() -> list[str]:
    return [one.name.removeprefix("GPU ") for one in gpu_memory()]


def _cores(workers: int, ranks: int) -> list[Mapping[str, str]]:
    """Split the cores: vLLM binds each of its processes to a list of them."""
    bound = os.environ.get(CORE_BINDING, "auto")
    if bound == "nobind":
        return [{}] * workers
    if bound != "auto":
        lists = bound.split("|")
        if len(lists) != workers * ranks:
            raise ConfigError(
                f"{CORE_BINDING} has {len(lists)} lists of cores, and --workers {workers} need {workers * ranks}; "
                "leave it out to split all cores"
            )
        return [{CORE_BINDING: "|".join(lists[number * ranks : (number + 1) * ranks])} for number in range(workers)]
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
    if len(cores) < workers * ranks:
        return [{CORE_BINDING: "nobind"}] * workers
    shares = [split(share, ranks) for share in split(cores, workers)]
    return [{CORE_BINDING: "|".join(",".join(one) for one in share)} for share in shares]
