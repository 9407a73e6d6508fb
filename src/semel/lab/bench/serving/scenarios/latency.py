"""One client, one request at a time: text only, new images, conversations, 80% repeats."""

from __future__ import annotations

import random
from statistics import median
from typing import Any, Final

from semel.lab.bench.serving.alternate import Pair
from semel.lab.bench.serving.bench import Bench, Side
from semel.lab.bench.serving.blocks import Load, block_rows, measure_blocks
from semel.lab.bench.serving.client import CHAT
from semel.lab.bench.serving.figures import Row, compared
from semel.lab.bench.serving.images import Size, chat, image_part, text_part
from semel.lab.bench.serving.procfs import cpu_s
from semel.lab.bench.serving.servers import ROLES
from semel.lab.bench.serving.stages import scrape, stage_rows
from semel.lab.bench.serving.statistics import mean_of, mean_ratio, median_of

__all__ = ["conversation", "new", "repeats", "stream", "text"]

_QUESTION: Final = "What is this?"
_SIZES: Final = {"1024": Size.SQUARE, "HD": Size.HD}
_WARMING: Final = 8
_REPEATED_SHARE: Final = 0.8
_CONVERSATION_IMAGES: Final = 4
_CPU_REPEATS: Final = 25
_TEXT: Final = chat(_QUESTION)
_TEXTS: Final = 20
"""Texts of a block, for each that is asked at a time."""


async def text(bench: Bench) -> list[Row]:
    """Ask a question without images; one at a time for the latency, then also 16 for what serving it costs."""

    async def ask(side: Side, _turn: int) -> float:
        return (await side.client.must(CHAT, _TEXT)).seconds * 1e3

    turns = await bench.turns("text", ask, turns=bench.effort.short_turns, warming=_WARMING)
    rows = [compared("text: latency", "ms", turns)]
    for at_a_time in (1, 16) if bench.is_here else ():
        title = f"{at_a_time} at a time"
        load = Load(_TEXT, _TEXTS * at_a_time, at_a_time)
        blocks = await measure_blocks(bench, f"text, {title}", load, turns=bench.effort.bursts)
        rows += block_rows(f"text: {{}}, {title}", blocks, ("serving CPU", "context switches"))
    return rows


async def new(bench: Bench) -> list[Row]:
    """Images that are new to both servers."""
    rows = []
    for name, size in _SIZES.items():
        count = bench.effort.long_turns
        bodies = [_question(bench, size) for _ in range(count + 1)]

        async def ask(side: Side, turn: int, bodies: list[bytes] = bodies) -> float:
            return (await side.client.must(CHAT, bodies[turn])).seconds * 1e3

        turns = await bench.turns(f"new images, {name}", ask, turns=count)
        rows.append(compared(f"new: {name}, latency", "ms", turns))
    return rows


async def conversation(bench: Bench) -> list[Row]:
    """Every turn has a new image, and repeats all earlier ones."""
    count = bench.effort.long_turns
    talks = [_talk(bench) for _ in range(count + 1)]

    async def ask(side: Side, turn: int) -> tuple[float, float]:
        answers = [await side.client.must(CHAT, body) for body in talks[turn]]
        follow_up = answers[-1].seconds * 1e3
        return follow_up, sum(answer.seconds for answer in answers[:-1]) * 1e3

    turns = await bench.turns("conversations", ask, turns=count)
    follow_up = Pair([turn[0] for turn in turns.semel], [turn[0] for turn in turns.vllm])
    whole = Pair([turn[1] for turn in turns.semel], [turn[1] for turn in turns.vllm])
    return [
        compared(f"conversation: {_CONVERSATION_IMAGES} turns, each with one more image", "ms", whole),
        compared(f"conversation: one more question about all {_CONVERSATION_IMAGES}", "ms", follow_up),
        *await _spent_on_question(bench, "the same question again", talks[-1][-1]),
        *await _spent_on_question(bench, "a text", _TEXT),
    ]


async def _spent_on_question(bench: Bench, what: str, body: bytes) -> list[Row]:
    """Return what a request takes, by process of both sides, and by stage of semel."""
    if not bench.is_here:
        return []
    pids = {id(side): side.server.roles() for side in (bench.sides.semel, bench.sides.vllm)}

    async def ask(side: Side, _turn: int) -> dict[str, float]:
        before = {role: cpu_s(some) for role, some in pids[id(side)].items()}
        took = median([(await side.client.must(CHAT, body)).seconds for _ in range(_CPU_REPEATS)])
        spent = {role: (cpu_s(pids[id(side)][role]) - begun) / _CPU_REPEATS for role, begun in before.items()}
        return {name: seconds * 1e3 for name, seconds in (spent | {"latency": took}).items()}

    before = await scrape(bench.sides.semel.client)
    turns = await bench.turns(f"{what}, by process", ask, turns=bench.effort.bursts)
    after = await scrape(bench.sides.semel.client)
    rows = []
    for name in ("latency", *ROLES):
        mine, theirs = ([turn[name] for turn in side if name in turn] for side in (turns.semel, turns.vllm))
        title = f"conversation: {what}, {name}" if name == "latency" else f"conversation: {what}, CPU time, {name}"
        if mine and theirs:
            rows.append(compared(title, "ms", Pair(mine, theirs)))
        elif mine:
            rows.append(Row(title, "ms", median_of(mine)))
    return rows + stage_rows(f"conversation: {what}, stage", before, after)


def _talk(bench: Bench) -> list[bytes]:
    """Return the bodies of a conversation; the last one has no new image."""
    said: list[Any] = []
    bodies = []
    for _ in range(_CONVERSATION_IMAGES):
        said.append([image_part(bench.images.draw(Size.SQUARE)), text_part(_QUESTION)])
        bodies.append(chat(*said))
        said.append("It is an image.")
    return [*bodies, chat(*said, "And all of them together?")]


async def repeats(bench: Bench) -> list[Row]:
    """Ask a series of questions; four in five repeat an earlier image."""
    count = bench.effort.long_turns * 5
    bodies = [_question(bench, Size.SQUARE) for _ in range(count)]
    order = stream(count, random.Random(bench.images.seed))

    async def ask(side: Side, turn: int) -> float:
        return (await side.client.must(CHAT, bodies[order[turn]])).seconds * 1e3

    turns = await bench.turns("80% repeats", ask, turns=count - 1)
    mean = mean_ratio(turns.semel, turns.vllm)
    return [
        compared("repeats: 80% of 1024, latency, median", "ms", turns),
        Row("repeats: 80% of 1024, latency, mean", "ms", mean_of(turns.semel), mean_of(turns.vllm), mean),
    ]


def stream(count: int, rng: random.Random) -> list[int]:
    """Return the image of each question: the first is new, then one in five."""
    seen = [0]
    stream = [0]
    for _ in range(count - 1):
        is_new = rng.random() >= _REPEATED_SHARE
        if is_new:
            seen.append(len(seen))
        stream.append(seen[-1] if is_new else rng.choice(seen))
    return stream


def _question(bench: Bench, size: Size) -> bytes:
    return chat([image_part(bench.images.draw(size)), text_part(_QUESTION)])
