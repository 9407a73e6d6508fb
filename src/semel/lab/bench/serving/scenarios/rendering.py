"""Rendering apart from generating: many new images that are only rendered; render first, then generate.

The rendered prompt is forwarded unchanged, byte by byte. A client that parses and rewrites the JSON pays for that in
addition, and much more if it has tensors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final

from semel.lab.bench.serving.alternate import Pair
from semel.lab.bench.serving.bench import Bench, Side
from semel.lab.bench.serving.client import CHAT, GENERATE, RENDER, Client
from semel.lab.bench.serving.figures import Row, compared, counted
from semel.lab.bench.serving.images import Size, chat, image_part, text_part
from semel.lab.bench.serving.procfs import busiest_s, thread_s

__all__ = ["generate", "render"]

_AT_A_TIME: Final = 16
_WARMING: Final = 4
_QUESTION: Final = "What is this?"


@dataclass(frozen=True, slots=True)
class _Burst:
    """The cost of one image of a burst."""

    clock_ms: float
    cpu_ms: float
    """The CPU time of all processes."""

    thread_ms: float
    """That of the busiest thread of the HTTP processes, besides the one with the event loop."""


async def render(bench: Bench) -> list[Row]:
    """New images, 16 at a time, rendered and not executed: without tensors, then with them."""
    looked = await _bursts(bench, "rendering", {"mm_payload": "none"}, accept="application/json")
    tensors = await _bursts(bench, "rendering with tensors", {}, accept="application/x-safetensors")
    name = f"render: {_AT_A_TIME} new images at a time"
    return [*_rows(bench, name, looked), *_rows(bench, f"{name} with their tensors", tensors)]


async def _bursts(bench: Bench, what: str, for_vllm: Mapping[str, object], *, accept: str) -> Pair[list[_Burst]]:
    count = bench.effort.bursts + 1
    messages = [[_image(bench) for _ in range(_AT_A_TIME)] for _ in range(count)]

    async def burst(side: Side, turn: int) -> _Burst:
        is_vllm = side is bench.sides.vllm or side.has_door
        bodies = [chat(message, **(for_vllm if is_vllm else {})) for message in messages[turn]]
        pids = side.server.frontend_pids()
        async with side.client.wider(_AT_A_TIME) as client:
            await _all(client, [chat(_QUESTION)] * _AT_A_TIME, "application/json")  # opens the connections
            threads, spent_s, began = thread_s(pids), side.cpu_s(), perf_counter()
            await _all(client, bodies, accept)
            took = perf_counter() - began, side.cpu_s() - spent_s, busiest_s(pids, threads)
            return _Burst(*(seconds / _AT_A_TIME * 1e3 for seconds in took))

    return await bench.turns(f"{what}, {_AT_A_TIME} at a time", burst, turns=count - 1)


def _rows(bench: Bench, name: str, bursts: Pair[list[_Burst]]) -> list[Row]:
    clock = Pair([one.clock_ms for one in bursts.semel], [one.clock_ms for one in bursts.vllm])
    spent = Pair([one.cpu_ms for one in bursts.semel], [one.cpu_ms for one in bursts.vllm])
    thread = Pair([one.thread_ms for one in bursts.semel], [one.thread_ms for one in bursts.vllm])
    rows = [compared(f"{name}, per image", "ms", clock)]
    if bench.is_here:
        rows.append(compared(f"{name}, CPU time per image", "ms", spent))
        rows.append(compared(f"{name}, busiest thread per image", "ms", thread))
    return rows


async def _all(client: Client, bodies: Sequence[bytes], accept: str) -> None:
    async with asyncio.TaskGroup() as asking:
        for body in bodies:
            asking.create_task(client.must(RENDER, body, accept=accept))


def _image(bench: Bench) -> list[dict[str, Any]]:
    return [image_part(bench.images.draw(Size.SQUARE)), text_part(_QUESTION)]


async def generate(bench: Bench) -> list[Row]:
    """Render, then generate, with an image that was executed before."""
    image = _image(bench)
    plain, by_hash = chat(image), chat(image, mm_payload="none")
    for side in (bench.sides.semel, bench.sides.vllm):
        await side.client.must(CHAT, plain)
    sizes: dict[str, int] = {}

    async def both(side: Side, body: bytes, form: str) -> float:
        rendered = await side.client.must(RENDER, body)
        sizes[form] = len(rendered.body)
        generated = await side.client.must(GENERATE, rendered.body)
        return (rendered.seconds + generated.seconds) * 1e3

    async def with_tensors(side: Side, _turn: int) -> float:
        return await both(side, plain, "semel" if side is bench.sides.semel else "tensors")

    async def with_hashes(side: Side, _turn: int) -> float:
        return await both(side, *((plain, "semel") if side is bench.sides.semel else (by_hash, "hash")))

    count = max(bench.effort.short_turns // 4, 8)
    tensors = await bench.turns("render, generate with tensors", with_tensors, turns=count, warming=_WARMING)
    hashes = await bench.turns("render, generate by hash", with_hashes, turns=count, warming=_WARMING)
    return [
        compared("generate: repeat, next to vLLM's with tensors", "ms", tensors),
        compared("generate: repeat, next to vLLM's by hash", "ms", hashes),
        counted("generate: body, next to vLLM's with tensors", "bytes", sizes["semel"], sizes["tensors"]),
        counted("generate: body, next to vLLM's by hash", "bytes", sizes["semel"], sizes["hash"]),
    ]
