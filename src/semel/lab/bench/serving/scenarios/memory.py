"""The memory of each side's processes, and whether it is what `semel.sizing` predicts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from semel.core.flag import GIB
from semel.lab.bench.serving.bench import Bench
from semel.lab.bench.serving.figures import Row, counted
from semel.lab.bench.serving.procfs import pss_bytes
from semel.lab.bench.serving.stages import scrape
from semel.sizing import Host, memory_of, usable_cores
from semel.telemetry import metrics

__all__ = ["memory"]

_ITEM_CACHE: Final = 4 * GIB
"""The maximum of vLLM's item cache, unless flags change it."""
_KV_CACHE: Final = "VLLM_CPU_KVCACHE_SPACE"

_PAUSE_S: Final = 10.0
_MAX_LOOKS: Final = 12
_STEADY_BYTES: Final = 8 << 20


async def memory(bench: Bench) -> list[Row]:
    """PSS of all processes after all earlier scenarios; semel's with the prediction, where there is one."""
    if not bench.is_here:
        return []
    mine, theirs = await _settled(bench)
    rows = [counted("memory: all processes (PSS)", "MB", mine / 1e6, theirs / 1e6)]
    if (host := await _host(bench)) is not None:
        predicted = sum(part.nbytes for part in memory_of(host))
        rows.append(counted("memory: what sizing predicts", "MB", predicted / 1e6))
        rows.append(counted("memory: how far off the prediction is", "%", 100 * abs(mine / predicted - 1)))
    return rows


async def _settled(bench: Bench) -> tuple[int, int]:
    """Return what each side takes once that changes no more: semel loads a spare process after it is ready."""
    servers = bench.sides.semel.server, bench.sides.vllm.server
    before = mine, theirs = 0, 0
    for _ in range(_MAX_LOOKS):
        mine, theirs = (pss_bytes(server.pids()) for server in servers)
        if max(abs(mine - before[0]), abs(theirs - before[1])) < _STEADY_BYTES:
            break
        before = mine, theirs
        await asyncio.sleep(_PAUSE_S)
    return mine, theirs


async def _host(bench: Bench) -> Host | None:
    """The host for the prediction; None if the engine's share of the memory is unknown, or if flags change it."""
    launch = bench.launch
    if launch is None or _KV_CACHE not in launch.environment or any("-cache-" in flag for flag in launch.flags):
        return None
    said = await scrape(bench.sides.semel.client)
    return Host(
        processes=usable_cores(),
        feature_cache_bytes=int(said.total(metrics.MM_CACHE_BYTES, tier="processor")),
        media_cache_bytes=0,
        max_media_bytes=0,
        item_cache_bytes=min(_ITEM_CACHE, int(said.total(metrics.FEATURE_BYTES_SENT))),
        weights_bytes=_weights(Path(launch.model)),
        kv_cache_bytes=int(launch.environment[_KV_CACHE]) * GIB,
    )


def _weights(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
