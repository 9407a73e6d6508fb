"""Documents at scale: a stream of pages that nobody has seen, some at a time, each asked about once."""

from __future__ import annotations

import asyncio
import io
import random
from dataclasses import dataclass
from time import perf_counter
from typing import Final

from PIL import Image, ImageDraw, ImageFont

from semel.lab.bench.serving.alternate import Pair
from semel.lab.bench.serving.bench import Bench, Side
from semel.lab.bench.serving.client import CHAT
from semel.lab.bench.serving.figures import Row, compared
from semel.lab.bench.serving.images import chat, image_part, text_part

__all__ = ["HEIGHT", "WIDTH", "draw_page", "pages"]

WIDTH: Final = 1_240
HEIGHT: Final = 1_754
"""A4 at 150 dots per inch."""

_AT_A_TIME: Final = 4
_PAGES: Final = 8
_MARGIN: Final = 120
_LINE: Final = 22
_QUESTION: Final = "Transcribe this page."


@dataclass(frozen=True, slots=True)
class _Burst:
    per_second: float
    cpu_ms: float
    """CPU time of all processes per page."""


async def pages(bench: Bench) -> list[Row]:
    """Pages per second, and what a page costs."""
    count = max(bench.effort.bursts // 2, 2)
    drawn = [draw_page(bench.images.seed, number) for number in range((count + 1) * _PAGES)]
    bodies = [chat([image_part(page, "png"), text_part(_QUESTION)]) for page in drawn]

    async def burst(side: Side, turn: int) -> _Burst:
        turnstile = asyncio.Semaphore(_AT_A_TIME)
        async with side.client.wider(_AT_A_TIME) as client:

            async def ask(body: bytes) -> None:
                async with turnstile:
                    await client.must(CHAT, body)

            spent_s, began = side.cpu_s(), perf_counter()
            await asyncio.gather(*map(ask, bodies[turn * _PAGES : (turn + 1) * _PAGES]))
            seconds = perf_counter() - began
            return _Burst(_PAGES / seconds, (side.cpu_s() - spent_s) / _PAGES * 1e3)

    bursts = await bench.turns(f"new pages, {_AT_A_TIME} at a time", burst, turns=count)
    rates = Pair([one.per_second for one in bursts.semel], [one.per_second for one in bursts.vllm])
    rows = [compared("pages: new pages per second", "1/s", rates)]
    if bench.is_here:
        spent = Pair([one.cpu_ms for one in bursts.semel], [one.cpu_ms for one in bursts.vllm])
        rows.append(compared("pages: CPU time of all processes, per page", "ms", spent))
    return rows


def draw_page(seed: int, number: int) -> bytes:
    """Return a page of text as PNG, another one for each number."""
    chance = random.Random(f"page {seed}/{number}")
    page = Image.new("L", (WIDTH, HEIGHT), 255)
    drawing, font = ImageDraw.Draw(page), ImageFont.load_default_imagefont()
    for top in range(_MARGIN, HEIGHT - _MARGIN, _LINE):
        words = " ".join("".join(chance.choices("aeionrstl", k=chance.randint(2, 9))) for _ in range(24))
        drawing.text((_MARGIN, top), words[:160], fill=20, font=font)
    buffer = io.BytesIO()
    page.convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()
