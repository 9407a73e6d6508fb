"""`semel size`: how much memory a host needs."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from semel.cli import fetching
from semel.cli.options import MIB, CacheGb, MaxMediaInFlight
from semel.sizing import GIB, Host, Part, memory_of

__all__ = ["size"]


def size(
    processes: Annotated[int, typer.Option(min=1, help="Preprocessing processes of each frontend.")] = 2,
    frontends: Annotated[int, typer.Option(min=0, help="Frontends on the host.")] = 1,
    workers: Annotated[int, typer.Option(min=0, help="Workers on the host.")] = 1,
    feature_cache_gb: CacheGb = 1.0,
    media_cache_gb: fetching.CacheGb = 0.25,
    max_media_bytes_in_flight: MaxMediaInFlight = 2_048 * MIB,
    mm_processor_cache_gb: Annotated[float, typer.Option(help="GiB of each engine's item cache.")] = 4.0,
    weights_gb: Annotated[float, typer.Option(help="GiB of weights in the host's memory; on a GPU 0.")] = 0.0,
    kv_cache_gb: Annotated[float, typer.Option(help="GiB of KV cache in the host's memory; on a GPU 0.")] = 0.0,
) -> None:
    """Say how much memory a host needs at most, and for what."""
    host = Host(
        processes=processes,
        frontends=frontends,
        feature_cache=int(feature_cache_gb * GIB),
        media_cache=int(media_cache_gb * GIB),
        media_in_flight=max_media_bytes_in_flight,
        workers=workers,
        item_cache=int(mm_processor_cache_gb * GIB),
        weights=int(weights_gb * GIB),
        kv_cache=int(kv_cache_gb * GIB),
    )
    parts = memory_of(host)
    console = Console()
    for part in (*parts, Part("in all", sum(part.nbytes for part in parts))):
        console.print(f"{part.nbytes / GIB:8.2f} GiB  {part.name}", highlight=False)
