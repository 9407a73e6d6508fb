"""The requests of a trainer: groups of 16 answers to one new image, as `n=16` or as 16 requests at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final

from semel.lab.bench.serving.alternate import Pair
from semel.lab.bench.serving.bench import Bench, Side
from semel.lab.bench.serving.client import CHAT
from semel.lab.bench.serving.figures import Row, compared, counted
from semel.lab.bench.serving.images import Size, chat, image_part, text_part
from semel.lab.bench.serving.work import Work, work_of

__all__ = ["rollouts"]

_GROUP: Final = 16
_TOKENS: Final = 8
_QUESTION: Final = "What is this?"


@dataclass(frozen=True, slots=True)
class _Group:
    """One group of answers."""

    seconds: float
    work: Work


async def rollouts(bench: Bench) -> list[Row]:
    """Groups with `n=16`, then groups of 16 requests, each about an image that both servers have not seen."""
    one = await _groups(bench, f"rollouts, n={_GROUP}", {"n": _GROUP}, requests=1)
    many = await _groups(bench, f"rollouts, {_GROUP} requests", {}, requests=_GROUP)
    return [*_rows(f"rollouts: n={_GROUP}", one), *_rows(f"rollouts: {_GROUP} requests at once", many)]


async def _groups(bench: Bench, what: str, fields: dict[str, Any], *, requests: int) -> Pair[list[_Group]]:
    count = bench.effort.long_turns
    images = [bench.images.draw(Size.SQUARE) for _ in range(count + 1)]

    async def ask(side: Side, turn: int) -> _Group:
        content = [image_part(images[turn]), text_part(_QUESTION)]
        body = chat(content, temperature=1.0, max_tokens=_TOKENS, ignore_eos=True, **fields)
        async with side.client.wider(requests) as client:
            before, began = await work_of(bench, side), perf_counter()
            await asyncio.gather(*(client.must(CHAT, body) for _ in range(requests)))
            seconds = perf_counter() - began
            return _Group(seconds, (await work_of(bench, side)).since(before))

    return await bench.turns(what, ask, turns=count)


def _rows(name: str, groups: Pair[list[_Group]]) -> list[Row]:
    rates = Pair([1 / one.seconds for one in groups.semel], [1 / one.seconds for one in groups.vllm])
    preprocessed = [_mean([one.work.preprocessed for one in side]) for side in (groups.semel, groups.vllm)]
    decoded = [_mean([one.work.decoded for one in side]) for side in (groups.semel, groups.vllm)]
    rows = [
        compared(f"{name}, groups per second", "1/s", rates),
        counted(f"{name}, decodes per group", "", *decoded),
        counted(f"{name}, preprocessings per group", "", *preprocessed),
    ]
    encoded = [one.work.encoded for one in groups.semel if one.work.encoded is not None]
    sent = [one.work.sent_bytes for one in groups.semel if one.work.sent_bytes is not None]
    rows += [counted(f"{name}, encodes per group", "", _mean(encoded))] if encoded else []
    return rows + ([counted(f"{name}, feature bytes per group", "bytes", _mean(sent))] if sent else [])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
