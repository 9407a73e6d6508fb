"""As many requests as a server can take: throughput, and the CPU time of a request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final

from semel.lab.bench.serving.alternate import Pair
from semel.lab.bench.serving.bench import Bench, Side
from semel.lab.bench.serving.client import CHAT, Client
from semel.lab.bench.serving.figures import Row, compared
from semel.lab.bench.serving.images import Size, chat, image_part, text_part

__all__ = ["saturation"]

_AT_A_TIME: Final = 16
_IMAGES: Final = 4
_QUESTION: Final = "What is this?"


@dataclass(frozen=True, slots=True)
class _Burst:
    per_second: float
    frontend_ms: float
    """CPU time of the HTTP processes per request."""

    all_ms: float


async def saturation(bench: Bench) -> list[Row]:
    """16 concurrent requests, each followed by the next: text only, then repeated images."""
    words = await _bursts(bench, "saturation, text", [chat(_QUESTION)])
    images = [[image_part(bench.images.draw(Size.SQUARE)), text_part(_QUESTION)] for _ in range(_IMAGES)]
    repeats = await _bursts(bench, "saturation, repeats", [chat(image) for image in images])
    return [*_rows(bench, "text requests", words), *_rows(bench, "repeats of 1024", repeats)]


async def _bursts(bench: Bench, what: str, bodies: Sequence[bytes]) -> Pair[list[_Burst]]:
    async def burst(side: Side, _turn: int) -> _Burst:
        async with side.client.wider(_AT_A_TIME) as client:
            frontend_s, all_s, began = side.frontend_cpu_s(), side.cpu_s(), perf_counter()
            answered = await _drive(client, bodies, bench.effort.burst_s)
            seconds = perf_counter() - began
            return _Burst(
                answered / seconds,
                (side.frontend_cpu_s() - frontend_s) / answered * 1e3,
                (side.cpu_s() - all_s) / answered * 1e3,
            )

    return await bench.turns(what, burst, turns=bench.effort.bursts)


async def _drive(client: Client, bodies: Sequence[bytes], seconds: float) -> int:
    """Return the number of answered requests, including those in flight when the time is over."""
    until, answered = perf_counter() + seconds, 0

    async def ask_on(number: int) -> None:
        nonlocal answered
        while perf_counter() < until:
            await client.must(CHAT, bodies[number % len(bodies)])
            answered += 1

    async with asyncio.TaskGroup() as asking:
        for number in range(_AT_A_TIME):
            asking.create_task(ask_on(number))
    return answered


def _rows(bench: Bench, what: str, bursts: Pair[list[_Burst]]) -> list[Row]:
    def of(part: str) -> Pair[list[float]]:
        return Pair([getattr(one, part) for one in bursts.semel], [getattr(one, part) for one in bursts.vllm])

    rows = [compared(f"saturation: {what} per second", "1/s", of("per_second"))]
    if bench.is_here:
        rows.append(compared(f"saturation: {what}, CPU time of the frontend", "ms", of("frontend_ms")))
        rows.append(compared(f"saturation: {what}, CPU time of all processes", "ms", of("all_ms")))
    return rows
