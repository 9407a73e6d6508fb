"""Blocks of equal requests: the serving CPU, context switches and latency of one.

Serving CPU is that of all processes but vLLM's engine, whose spinning follows the machine. A block is one measurement;
the blocks of both sides alternate, and a ratio is the median of the ratios of blocks that followed each other.
The connections of a block are new, because servers close those that are idle while the other side has its turn; each
has had an answer before anything is counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Final

from semel.lab.bench.serving.alternate import Pair
from semel.lab.bench.serving.bench import Bench, Side
from semel.lab.bench.serving.client import CHAT, Client
from semel.lab.bench.serving.figures import Row
from semel.lab.bench.serving.images import chat
from semel.lab.bench.serving.procfs import context_switches, run_s
from semel.lab.bench.serving.statistics import median_of, paired_ratio

__all__ = ["SERVING", "Block", "Load", "block_rows", "measure_blocks", "series"]

_FIGURES: Final[Mapping[str, tuple[str, str]]] = {
    "serving CPU": ("cpu_ms", "ms"),
    "context switches": ("switches", ""),
    "latency": ("latency_ms", "ms"),
    "CPU time of all processes": ("all_ms", "ms"),
}
_HELLO: Final = chat("Hello")
SERVING: Final = ("serving CPU", "context switches", "latency")


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of a block."""

    body: bytes
    count: int
    at_a_time: int = 1
    units: int = 1
    """What a request counts as: the number of its tokens, if figures are of a token."""


@dataclass(frozen=True, slots=True)
class Block:
    """The cost of a block, by unit."""

    cpu_ms: float
    switches: float
    latency_ms: float
    all_ms: float
    """The CPU time of all processes, with the engine's."""


async def measure_blocks(bench: Bench, what: str, load: Load, *, turns: int, warming: int = 1) -> Pair[list[Block]]:
    """Send `turns` blocks to each side, in turns."""
    return await bench.turns(what, partial(_measure, load), turns=turns, warming=warming)


def series(blocks: Pair[list[Block]], figure: str) -> Pair[list[float]]:
    """Return one figure of all blocks."""
    attribute = _FIGURES[figure][0]
    return Pair(*([getattr(block, attribute) for block in side] for side in (blocks.semel, blocks.vllm)))


def block_rows(title: str, blocks: Pair[list[Block]], figures: Sequence[str] = SERVING) -> list[Row]:
    """Return a row of each figure, whose name replaces `{}` in the title."""
    rows = []
    for figure in figures:
        both = series(blocks, figure)
        mine, theirs, ratio = median_of(both.semel), median_of(both.vllm), paired_ratio(both.semel, both.vllm)
        rows.append(Row(title.format(figure), _FIGURES[figure][1], mine, theirs, ratio))
    return rows


async def _measure(load: Load, side: Side, _turn: int) -> Block:
    pids, all_pids = side.server.serving_pids(), side.server.pids()
    async with side.client.wider(load.at_a_time) as client:
        await _ask(client, Load(_HELLO, load.at_a_time, load.at_a_time))
        cpu_s, all_s, switches = run_s(pids), run_s(all_pids), context_switches(pids)
        latencies = await _ask(client, load)
        units = load.count * load.units
        return Block(
            (run_s(pids) - cpu_s) * 1e3 / units,
            (context_switches(pids) - switches) / units,
            median(latencies) / load.units,
            (run_s(all_pids) - all_s) * 1e3 / units,
        )


async def _ask(client: Client, load: Load) -> list[float]:
    """Send the requests of a block; returns their latencies in milliseconds."""
    left, latencies = iter(range(load.count)), list[float]()

    async def ask_on() -> None:
        for _ in left:
            latencies.append((await client.must(CHAT, load.body)).seconds * 1e3)

    async with asyncio.TaskGroup() as asking:
        for _ in range(load.at_a_time):
            asking.create_task(ask_on())
    return latencies
