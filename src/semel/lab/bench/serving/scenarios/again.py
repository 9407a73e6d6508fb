"""A repeated image, next to a request without one: what does the image add?

To a client it adds latency, to the machine CPU time. On a small machine the engine's own share of the latency is large
and nobody's but vLLM's, so a repeat is also measured next to vLLM's engine in process (`floor`): what the image adds to
semel beyond what it adds to the engine is semel's, with HTTP and the client. That engine starts when vLLM's server has
ended.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from semel.lab.bench.serving.alternate import Pair, take_turns
from semel.lab.bench.serving.bench import Bench, Side
from semel.lab.bench.serving.blocks import Load, block_rows, measure_blocks, series
from semel.lab.bench.serving.client import CHAT, Client
from semel.lab.bench.serving.figures import Row, compared
from semel.lab.bench.serving.floor import Floor
from semel.lab.bench.serving.images import Size, chat, image_part, text_part
from semel.lab.bench.serving.stages import scrape, stage_rows
from semel.lab.bench.serving.statistics import added, added_beyond, added_ratio

__all__ = ["added_row", "again", "again_next_to_engine"]

_QUESTION: Final = "What is this?"
_SIZES: Final = {"1024": Size.SQUARE, "HD": Size.HD}
_WARMING: Final = 8
_CPU_REPEATS: Final = 25
_TEXT: Final = chat(_QUESTION)


async def again(bench: Bench) -> list[Row]:
    """Measure what a repeated image adds to a request without one."""
    rows, spent = [], bench.effort.bursts
    text = Load(_TEXT, _CPU_REPEATS)
    texts = await measure_blocks(bench, "CPU time of texts", text, turns=spent) if bench.is_here else None
    for name, size in _SIZES.items():
        body = _question(bench, size)

        async def ask(side: Side, _turn: int, body: bytes = body) -> tuple[float, float]:
            words = await side.client.must(CHAT, _TEXT)
            return words.seconds * 1e3, (await side.client.must(CHAT, body)).seconds * 1e3

        what = f"the same image again, {name}"
        turns = await bench.turns(what, ask, turns=bench.effort.short_turns, warming=_WARMING)
        floor, whole = _parts(turns)
        rows.append(compared(f"again: {name}, latency", "ms", whole))
        rows.append(added_row(f"again: {name}, what the image adds", whole, floor))
        if texts is not None:
            rows += await _spent(bench, name, body, series(texts, "serving CPU"))
    return rows


async def _spent(bench: Bench, name: str, body: bytes, texts: Pair[list[float]]) -> list[Row]:
    """Measure the CPU time of a repeat, which other load on the machine does not change; and semel's time by stage."""
    before = await scrape(bench.sides.semel.client)
    load = Load(body, _CPU_REPEATS)
    repeats = await measure_blocks(bench, f"CPU time of repeats, {name}", load, turns=bench.effort.bursts)
    after = await scrape(bench.sides.semel.client)
    return [
        *block_rows(f"again: {name}, {{}}", repeats, ("CPU time of all processes", "serving CPU")),
        added_row(f"again: {name}, serving CPU that the image adds", series(repeats, "serving CPU"), texts),
        *stage_rows(f"again: {name}, stage", before, after),
    ]


async def again_next_to_engine(bench: Bench, client: Client, engine: Floor) -> list[Row]:
    """Measure what a repeat adds to semel, by `client`, and to the engine in process."""

    async def ask_semel(body: bytes) -> float:
        return (await client.must(CHAT, body)).seconds * 1e3

    async def ask_engine(body: bytes) -> float:
        return (await engine.ask(body)).seconds * 1e3

    rows = []
    for name, size in _SIZES.items():
        body, count = _question(bench, size), bench.effort.short_turns
        bench.tell(f"the same image again, {name}, next to the engine in process", 0, 1)

        async def ask(side: Callable[[bytes], Awaitable[float]], _turn: int, body: bytes = body) -> tuple[float, float]:
            return await side(_TEXT), await side(body)

        turns = await take_turns(Pair(ask_semel, ask_engine), ask, turns=_WARMING + count)
        floor, whole = _parts(Pair(turns.semel[_WARMING:], turns.vllm[_WARMING:]))
        beyond = added_beyond(whole.semel, floor.semel, whole.vllm, floor.vllm)
        rows.append(added_row(f"again: {name}, what the image adds, next to the engine in process", whole, floor))
        rows.append(Row(f"again: {name}, what the image adds beyond the engine in process", "ms", beyond))
    return rows


def _parts(turns: Pair[list[tuple[float, float]]]) -> tuple[Pair[list[float]], Pair[list[float]]]:
    """Return the latencies of texts, and those of repeats."""
    texts, repeats = (
        Pair([turn[place] for turn in turns.semel], [turn[place] for turn in turns.vllm]) for place in (0, 1)
    )
    return texts, repeats


def added_row(name: str, whole: Pair[list[float]], floor: Pair[list[float]]) -> Row:
    """Return a row of what `whole` adds to its floor, on both sides."""
    return Row(
        name,
        "ms",
        added(whole.semel, floor.semel),
        added(whole.vllm, floor.vllm),
        added_ratio(whole.semel, floor.semel, whole.vllm, floor.vllm),
    )


def _question(bench: Bench, size: Size) -> bytes:
    return chat([image_part(bench.images.draw(size)), text_part(_QUESTION)])
