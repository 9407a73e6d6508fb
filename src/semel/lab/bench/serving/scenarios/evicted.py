"""Images that come back after the encoder cache has evicted them: what does the eviction add?

More images than the encoder cache holds are asked about in turn, so each is gone when it comes back. It is asked
about again at once, when its encoder output is there: the difference is what the eviction costs. A text that is new
each time stands before the image, so no prefix covers it. semel's side has an embedding tier in this scenario; both
have the same encoder cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from semel.lab.bench.serving.alternate import Pair
from semel.lab.bench.serving.bench import Bench, Side
from semel.lab.bench.serving.client import CHAT, Client
from semel.lab.bench.serving.figures import Row, compared, counted
from semel.lab.bench.serving.images import Size, chat, image_part, text_part
from semel.lab.bench.serving.stages import scrape
from semel.lab.bench.serving.statistics import added, added_ratio
from semel.telemetry import metrics
from semel.telemetry.scrape import Scrape

__all__ = ["COMMON_FLAGS", "SEMEL_FLAGS", "Turn", "added_rows", "evicted", "worker_metrics"]

COMMON_FLAGS: Final = ("--limit-mm-per-prompt", '{"video": 0}')
"""Of both sides: else a video of the largest size decides how many embeddings the encoder cache holds."""

SEMEL_FLAGS: Final = ("--embedding-tier-gb", "1")

_CYCLES: Final = {"1024": (Size.SQUARE, 8), "HD": (Size.HD, 5)}
"""The encoder cache of the tiny model, 8,192 embeddings, holds five of the first and three of the second."""

Turn = tuple[float, float]
"""The latency of an image that was evicted, and of the same one when it is resident, in ms."""


async def evicted(bench: Bench) -> list[Row]:
    """Return what an eviction adds to an ask, and how many asks were encoded."""
    before = await worker_metrics(bench.sides.semel)
    rows, asks = [], 0
    for name, (size, count) in _CYCLES.items():
        turns = count + max(count, 2 * bench.effort.long_turns)
        rows += added_rows(f"evicted: {name}", "the eviction", await _cycle(bench, name, size, count, turns))
        asks += 2 * (turns - count)
    after = await worker_metrics(bench.sides.semel)
    if before is not None and after is not None:
        # Every image is encoded once, in the turns that warm up.
        images = sum(count for _, count in _CYCLES.values())
        planned, loaded = (
            after.total(one) - before.total(one) for one in (metrics.ENCODER_PLANNED, metrics.EMBEDDING_LOADS)
        )
        rows.append(counted("evicted: encodes of images that were encoded before", "", planned - loaded - images))
        rows.append(counted("evicted: encoder outputs loaded, of so many asks", "", loaded, asks))
        rows.append(
            counted("evicted: embeddings in the encoder cache", "", after.total(metrics.ENCODER_CACHE_CAPACITY))
        )
    return rows


async def _cycle(bench: Bench, name: str, size: Size, count: int, turns: int) -> Pair[list[Turn]]:
    parts = [image_part(bench.images.draw(size)) for _ in range(count)]
    nonces = iter(range(1_000_000))

    async def ask(side: Side, turn: int) -> Turn:
        image = parts[turn % count]
        took = []
        for _ in range(2):
            new = text_part(f"{bench.images.seed} {name} {next(nonces)}")
            body = chat([new, image, text_part("What is this?")])
            took.append((await side.client.must(CHAT, body)).seconds * 1e3)
        return took[0], took[1]

    return await bench.turns(f"evicted images, {name}", ask, turns=turns - count, warming=count)


def added_rows(prefix: str, cause: str, turns: Pair[list[Turn]]) -> list[Row]:
    """The figures of asks in pairs: the first without a resident encoder output, for some cause, the second with it."""
    gone, there = (_column(turns, place) for place in (0, 1))
    adds = Row(
        f"{prefix}, what {cause} adds",
        "ms",
        added(gone.semel, there.semel),
        added(gone.vllm, there.vllm),
        added_ratio(gone.semel, there.semel, gone.vllm, there.vllm),
    )
    return [
        compared(f"{prefix}, latency", "ms", gone),
        compared(f"{prefix}, latency of a resident one", "ms", there),
        adds,
    ]


def _column(turns: Pair[list[Turn]], place: int) -> Pair[list[float]]:
    def of(series: Sequence[Turn]) -> list[float]:
        return [turn[place] for turn in series]

    return Pair(of(turns.semel), of(turns.vllm))


async def worker_metrics(side: Side) -> Scrape | None:
    """Return the metrics of semel's worker, if it was started here."""
    if side.server.admin_url is None:
        return None
    async with Client(side.server.admin_url) as admin:
        return await scrape(admin)
