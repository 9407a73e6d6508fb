"""`semel size`: how much memory a host needs."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console

from semel.core.flag import GIB, flag, same_flag
from semel.frontend.limits import BudgetLimits
from semel.media.fetch.settings import FetchSettings
from semel.settings.frontend import CacheSettings
from semel.settings.worker import EncoderSettings
from semel.sizing import Host, Part, memory_of

__all__ = ["SizeSettings", "print_size"]


@dataclass(frozen=True, slots=True)
class SizeSettings:
    """The settings of `semel size`."""

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


def print_size(settings: SizeSettings) -> None:
    """Print the parts of the sum, and the sum."""
    host = Host(
        processes=settings.processes,
        frontends=settings.frontends,
        feature_cache=settings.feature_cache_bytes,
        media_cache=settings.media_cache_bytes,
        media_in_flight=settings.max_media_bytes,
        workers=settings.workers,
        item_cache=settings.item_cache_bytes,
        weights=settings.weights_bytes,
        kv_cache=settings.kv_cache_bytes,
        ranks=settings.ranks,
        encoder_cache=settings.encoder_cache_embeddings * settings.embedding_bytes,
        embedding_tier=settings.embedding_tier_bytes,
    )
    parts = memory_of(host)
    console = Console()
    for part in (*parts, Part("in all", sum(part.nbytes for part in parts))):
        console.print(f"{part.nbytes / GIB:8.2f} GiB  {part.name}", highlight=False)
