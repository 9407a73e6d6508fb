"""A load with a tenth of refused and a tenth of aborted requests: do the good requests between them fail?

The requests are decided in advance, from a seed. A request that the engine refuses after its image was rendered, or
that ends before the engine has the image, must not make a later request with the same image fail.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Final

import aiohttp

from semel.lab.bench.serving.bench import Bench
from semel.lab.bench.serving.client import CHAT, Client
from semel.lab.bench.serving.figures import Row, counted
from semel.lab.bench.serving.images import Size, chat, image_part, text_part

__all__ = ["Ask", "Kind", "drive", "mixed", "plan"]

_AT_A_TIME: Final = 8
_REFUSED: Final = 0.1
_ABORTED: Final = 0.1
_REPEATS: Final = 3  # times, each image, on average

_REFUSALS: Final[tuple[dict[str, object], ...]] = (
    {"logit_bias": {"8888888": 1.0}},
    {"min_tokens": 50, "max_tokens": 4},
    {"allowed_token_ids": [9_999_999]},
    {"stop_token_ids": [9_999_999]},
    {"repetition_penalty": 0.0},
)
"""Requests that only the engine can refuse: because of its vocabulary, or because of how fields combine."""


class Kind(Enum):
    """The outcome of a request."""

    GOOD = "good"
    REFUSED = "refused"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    kind: Kind
    image: int
    refusal: int


def plan(requests: int, seed: int) -> list[Ask]:
    """Return the requests of a load, in order."""
    rng = random.Random(seed)
    images = max(requests // _REPEATS, 1)
    kinds = rng.choices(tuple(Kind), (1 - _REFUSED - _ABORTED, _REFUSED, _ABORTED), k=requests)
    return [Ask(kind, rng.randrange(images), rng.randrange(len(_REFUSALS))) for kind in kinds]


async def mixed(bench: Bench) -> list[Row]:
    """Run the same load on both sides, one after the other. Nothing is timed."""
    asks = plan(bench.effort.mixed_requests, bench.images.seed)
    images = [bench.images.draw(Size.SMALL) for _ in range(max(ask.image for ask in asks) + 1)]
    failed: list[int] = []
    for name, side in (("semel", bench.sides.semel), ("vLLM", bench.sides.vllm)):
        on_done = partial(bench.tell, f"mixed load, {name}", total=len(asks))
        async with side.client.wider(_AT_A_TIME) as client:
            failed.append(await drive(client, asks, images, on_done))
    good = sum(ask.kind is Kind.GOOD for ask in asks)
    return [
        counted("mixed: good requests that fail", "requests", *failed),
        counted("mixed: good requests", "requests", good, good),
    ]


async def drive(client: Client, asks: Sequence[Ask], images: Sequence[bytes], on_done: Callable[[int], None]) -> int:
    """Return the number of good requests that failed."""
    left, done, failed = iter(asks), 0, 0

    async def work() -> None:
        nonlocal done, failed
        for ask in left:
            fails = await _fails(client, ask, images[ask.image])
            failed += fails
            done += 1
            on_done(done)

    async with asyncio.TaskGroup() as workers:
        for _ in range(_AT_A_TIME):
            workers.create_task(work())
    return failed


async def _fails(client: Client, ask: Ask, jpeg: bytes) -> bool:
    """Send it. Returns whether it is good and failed; a closed connection is a failure too."""
    content = [image_part(jpeg), text_part("What is this?")]
    try:
        match ask.kind:
            case Kind.GOOD:
                return (await client.ask(CHAT, chat(content, max_tokens=4))).status != 200
            case Kind.REFUSED:
                await client.ask(CHAT, chat(content, **_REFUSALS[ask.refusal]))
            case Kind.ABORTED:
                await client.leave(CHAT, chat(content, max_tokens=200, ignore_eos=True, stream=True))
    except (aiohttp.ClientError, TimeoutError):
        return ask.kind is Kind.GOOD
    return False
