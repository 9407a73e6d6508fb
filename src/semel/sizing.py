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

from semel.core.flag import GIB, MIB, flag, same_flag
from semel.frontend.limits import BudgetLimits
from semel.media.fetch.settings import FetchSettings
from semel.settings.frontend import CacheSettings
from semel.settings.worker import EncoderSettings

__all__ = ["Host", "Part", "memory_of", "usable_cores"]

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
    """The processes and caches of a host, and the flags of `semel size`. Bytes are capacities, or those held."""

    processes: int = flag(
        2, "preprocessing-processes", help="Preprocessing processes of each frontend.", group="Host", min=1
    )
    frontends: int = flag(1, help="Frontends on the host.", group="Host", min=0)
    workers: int = flag(1, help="Workers on the host.", group="Host", min=0)
    feature_cache_bytes: int = same_flag(CacheSettings, "capacity_bytes")
    media_cache_bytes: int = same_flag(FetchSettings, "cache_bytes")
    max_media_bytes: int = same_flag(BudgetLimits, "max_bytes")
    item_cache_bytes: int = flag(
        4 * GIB,
        "mm-processor-cache-gb",
        help="Size of each engine's multimodal cache, in GiB, as for vLLM.",
        group="Caches",
        unit="GiB",
        min=0,
    )
    weights_bytes: int = flag(
        0, "weights-gb", help="Model weights in the host's memory, in GiB; 0 on a GPU.", group="Host", unit="GiB", min=0
    )
    kv_cache_bytes: int = flag(
        0, "kv-cache-gb", help="KV cache in the host's memory, in GiB; 0 on a GPU.", group="Host", unit="GiB", min=0
    )
    ranks: int = flag(
        1, help="Processes that vLLM starts for each worker (--tensor-parallel-size).", group="Host", min=1
    )
    encoder_cache_embeddings: int = flag(
        0, help="Size of each encoder cache in the host's memory; 0 on a GPU.", group="Encoder cache", min=0
    )
    embedding_tier_bytes: int = same_flag(EncoderSettings, "embedding_tier_bytes")
    embedding_bytes: int = flag(
        0, help="What one embedding takes; a worker logs it when it starts.", group="Caches", unit="bytes", min=0
    )

    @property
    def encoder_cache_bytes(self) -> int:
        """The encoder cache of each of vLLM's worker processes."""
        return self.encoder_cache_embeddings * self.embedding_bytes


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
        Part("media in flight, and fetched", host.frontends * (host.max_media_bytes + host.media_cache_bytes)),
        Part(
            "preprocessing processes and a spare",
            host.frontends * (POOL_TEMPLATE + (host.processes + 1) * POOL_PROCESS),
        ),
        Part("feature caches", host.frontends * host.feature_cache_bytes),
        Part("workers", host.workers * WORKER),
        Part("engine cores", host.workers * ENGINE_CORE),
        Part("item caches", host.workers * host.item_cache_bytes),
        Part(
            "vLLM's worker processes",
            host.workers * (host.ranks * ENGINE_RANK + host.weights_bytes + host.kv_cache_bytes),
        ),
        Part("encoder caches", host.workers * host.ranks * host.encoder_cache_bytes),
        Part("embedding tiers", host.workers * host.embedding_tier_bytes),
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
