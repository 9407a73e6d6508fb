"""A clip of 30 s, asked about five times: what does a repeated video add to a text, and how often is it decoded?"""

from __future__ import annotations

import io
from typing import Any, Final

import numpy as np

from semel.lab.bench.serving.alternate import Pair
from semel.lab.bench.serving.bench import Bench, Side
from semel.lab.bench.serving.client import CHAT
from semel.lab.bench.serving.figures import Row, compared, counted
from semel.lab.bench.serving.images import chat, media_part, text_part
from semel.lab.bench.serving.scenarios.again import added_row
from semel.lab.bench.serving.stages import scrape, stage_rows
from semel.lab.bench.serving.work import work_of

__all__ = ["draw_clip", "video"]

_WIDTH: Final = 640
_HEIGHT: Final = 360
_SECONDS: Final = 30
_FPS: Final = 30
_CELL: Final = 20
_BITS_PER_S: Final = 1_000_000
_QUESTIONS: Final = (
    "What is this?",
    "What moves?",
    "Which colour is it?",
    "How does it begin?",
    "How does it end?",
)


async def video(bench: Bench) -> list[Row]:
    """Ask five questions about each of some clips, and each question without a clip."""
    count = bench.effort.bursts
    texts = [chat(question) for question in _QUESTIONS]
    clips = [media_part("video", draw_clip(bench.images.seed, number), "mp4") for number in range(count + 1)]
    decoded: dict[bool, list[float]] = {True: [], False: []}

    async def ask(side: Side, turn: int) -> tuple[list[float], list[float]]:
        before = await work_of(bench, side)
        alone, together = [], []
        for question, text in zip(_QUESTIONS, texts, strict=True):
            alone.append((await side.client.must(CHAT, text)).seconds * 1e3)
            body = chat([clips[turn], text_part(question)])
            together.append((await side.client.must(CHAT, body)).seconds * 1e3)
        after = await work_of(bench, side)
        decoded[side is bench.sides.vllm].append(after.since(before).decoded)
        return alone, together

    started = await scrape(bench.sides.semel.client)
    turns = await bench.turns("a clip, five questions", ask, turns=count)
    ended = await scrape(bench.sides.semel.client)
    first = _series(turns, slice(0, 1))
    alone, repeats = _series(turns, slice(1, None))
    return [
        compared("video: first question, latency", "ms", first[1]),
        compared("video: repeat, latency", "ms", repeats),
        added_row("video: what a repeat adds", repeats, alone),
        counted("video: decodes for five questions", "", max(decoded[False]), max(decoded[True])),
        *stage_rows("video: texts and clips, stage", started, ended),
    ]


def _series(
    turns: Pair[list[tuple[list[float], list[float]]]], which: slice
) -> tuple[Pair[list[float]], Pair[list[float]]]:
    """Return the latencies of these questions without a clip, and with one."""
    alone, together = (
        Pair(*([one for turn in side for one in turn[place][which]] for side in (turns.semel, turns.vllm)))
        for place in (0, 1)
    )
    return alone, together


def draw_clip(seed: int, number: int, *, seconds: int = _SECONDS) -> bytes:
    """Return a clip as MP4 with H.264, another one for each number: cells that drift."""
    import av

    rng = np.random.default_rng([seed, number])
    cells = rng.integers(0, 256, (_HEIGHT * 3 // 2 // _CELL, _WIDTH // _CELL), dtype=np.uint8)
    planes = cells.repeat(_CELL, axis=0).repeat(_CELL, axis=1)  # brightness, and below it the colours
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as file:
        stream: Any = file.add_stream("libx264", rate=_FPS, options={"preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = _WIDTH, _HEIGHT, "yuv420p", _BITS_PER_S
        for step in range(seconds * _FPS):
            drifted = np.ascontiguousarray(np.roll(planes, 2 * step, axis=1))
            file.mux(stream.encode(av.VideoFrame.from_ndarray(drifted, format="yuv420p")))
        file.mux(stream.encode())
    return buffer.getvalue()
