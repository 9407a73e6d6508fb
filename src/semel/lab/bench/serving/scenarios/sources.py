"""Two checkouts of semel, one run: serving CPU, context switches and latency of a text, a repeated image, a token.

Serving CPU is that of all processes but vLLM's engine, whose spinning follows the machine. A turn is a block of
requests on one side; blocks alternate, so a slow second is slow for both, and the ratio is of medians over blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Final

from semel.lab.bench.serving.alternate import Pair
from semel.lab.bench.serving.bench import Bench, Side
from semel.lab.bench.serving.client import CHAT
from semel.lab.bench.serving.figures import Row, compared
from semel.lab.bench.serving.images import Size, chat, image_part, text_part
from semel.lab.bench.serving.procfs import context_switches, run_s

__all__ = ["sources"]

_ENGINE: Final = ("engine core", "engine worker")
_TOKENS: Final = 128
_WARMING: Final = 4


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of request, how many of it are a block, and how many units one of them counts as."""

    name: str
    body: bytes
    count: int
    units: int = 1


@dataclass(frozen=True, slots=True)
class _Block:
    """The cost of a block of requests, by unit."""

    cpu_ms: float
    switches: float
    latency_ms: float


_FIGURES: Final[Mapping[str, str]] = {
    "serving CPU": "cpu_ms",
    "context switches": "switches",
    "latency": "latency_ms",
}


async def sources(bench: Bench) -> list[Row]:
    """Rows of both checkouts: `semel` is this one, `vllm` the other."""
    image = image_part(bench.images.draw(Size.SQUARE))
    kinds = (
        _Kind("text", chat("What is this?"), 40),
        _Kind("repeat", chat([image, text_part("What is this?")]), 20),
        _Kind("token", chat("What is this?", stream=True, max_tokens=_TOKENS, ignore_eos=True), 1, units=_TOKENS),
    )
    rows = []
    for kind in kinds:
        blocks = await bench.turns(
            f"two sources, {kind.name}",
            partial(_block, kind),
            turns=bench.effort.short_turns // 4,
            warming=_WARMING,
        )
        for figure, field in _FIGURES.items():
            series = Pair(
                *([getattr(block, field) for block in blocks_of] for blocks_of in (blocks.semel, blocks.vllm))
            )
            unit = "" if figure == "context switches" else "ms"
            rows.append(compared(f"sources: {figure} of a {kind.name}", unit, series))
    return rows


async def _block(kind: _Kind, side: Side, _turn: int) -> _Block:
    pids = [pid for role, members in side.server.roles().items() if role not in _ENGINE for pid in members]
    cpu_s, switches, units = run_s(pids), context_switches(pids), kind.count * kind.units
    latencies = [(await side.client.must(CHAT, kind.body)).seconds * 1e3 for _ in range(kind.count)]
    return _Block(
        (run_s(pids) - cpu_s) * 1e3 / units,
        (context_switches(pids) - switches) / units,
        median(latencies) / kind.units,
    )
