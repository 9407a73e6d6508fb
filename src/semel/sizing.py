"""Memory of a host, from what runs on it and what its caches hold; and the CPU cores that a process may use.

The constants are what the processes of semel and vLLM 0.32 take by themselves, measured; a figure for another version
is measured anew, and `semel bench serve` holds the sum to what a running host takes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Final

__all__ = ["GIB", "MIB", "Host", "Part", "memory_of", "usable_cores"]

MIB: Final = 1 << 20
GIB: Final = 1 << 30

SUPERVISOR: Final = 30 * MIB
"""`semel serve` itself."""
FRONTEND: Final = 72 * MIB
"""A frontend's serving process, while nothing is in flight."""
POOL_TEMPLATE: Final = 330 * MIB
"""Memory that a frontend's preprocessing processes share: the libraries that their fork server has imported."""
POOL_PROCESS: Final = 75 * MIB
"""A preprocessing process with an HF processor, beyond that: half of it is staging memory and buffers."""
WORKER: Final = 490 * MIB
"""The process of a worker, with vLLM's client of its engine."""
ENGINE_CORE: Final = 480 * MIB
ENGINE_RANK: Final = 640 * MIB
"""One of vLLM's own worker processes on a CPU, without weights and KV cache."""
LIBRARIES: Final = 65 * MIB
"""Pages that all of these share."""


@dataclass(frozen=True, slots=True)
class Host:
    """The processes and caches of a host. Bytes are those held; for the most that it may take, give the capacities."""

    processes: int
    """Preprocessing processes of each frontend (`--preprocessing-processes`), without its loaded spare."""
    frontends: int = 1
    feature_cache: int = GIB
    """Bytes in the feature cache of each frontend (`--feature-cache-gb`)."""
    media_cache: int = 0
    """Bytes of fetched media that each frontend keeps (`--media-cache-gb` bounds them)."""
    media_in_flight: int = 0
    """Bytes of requests whose answers have not begun (`--max-media-bytes-in-flight` bounds them)."""
    workers: int = 1
    item_cache: int = 4 * GIB
    """Bytes in the item cache of each engine (`--mm-processor-cache-gb`)."""
    ranks: int = 1
    """vLLM's worker processes for each engine."""
    weights: int = 0
    """Bytes of weights in the host's memory, of each engine: on a GPU none stay."""
    kv_cache: int = 0
    """Bytes of KV cache in the host's memory, of each engine."""
    embedding_tier: int = 0
    """Bytes of host memory for encoder outputs (`--embedding-tier-gb`), of each engine: all of it, from the start."""
    encoder_cache: int = 0
    """Bytes of encoder outputs (`--encoder-cache-embeddings`) in the host's memory, of each of vLLM's worker processes:
    on a GPU they are in its memory."""


@dataclass(frozen=True, slots=True)
class Part:
    """One line of the sum."""

    name: str
    nbytes: int


def memory_of(host: Host) -> tuple[Part, ...]:
    """Return what each part of a host takes; the host takes the sum of them."""
    return (
        Part("semel serve, and libraries that all share", SUPERVISOR + LIBRARIES),
        Part("frontends", host.frontends * FRONTEND),
        Part("media in flight, and fetched", host.frontends * (host.media_in_flight + host.media_cache)),
        Part(
            "preprocessing processes and a spare",
            host.frontends * (POOL_TEMPLATE + (host.processes + 1) * POOL_PROCESS),
        ),
        Part("feature caches", host.frontends * host.feature_cache),
        Part("workers", host.workers * WORKER),
        Part("engine cores", host.workers * ENGINE_CORE),
        Part("item caches", host.workers * host.item_cache),
        Part("vLLM's worker processes", host.workers * (host.ranks * ENGINE_RANK + host.weights + host.kv_cache)),
        Part("encoder caches", host.workers * host.ranks * host.encoder_cache),
        Part("embedding tiers", host.workers * host.embedding_tier),
    )


_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(quota: Path = _QUOTA) -> int:
    """Count the cores that a process may use, at least 1: with a quota of 2 of 64 cores, a pod starts 2 processes."""
    cores = len(os.sched_getaffinity(0))
    try:
        allowed, period = quota.read_text().split()
        return max(1, min(cores, ceil(int(allowed) / int(period))))
    except (OSError, ValueError, ZeroDivisionError):  # no such file, or "max" in it: there is no quota
        return cores
