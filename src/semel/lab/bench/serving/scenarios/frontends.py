"""Two frontends and one engine: how many bytes do processes exchange when an image is repeated?"""

from __future__ import annotations

from typing import Final

from semel.lab.bench.serving.alternate import Pair, take_turns
from semel.lab.bench.serving.bench import Bench
from semel.lab.bench.serving.client import CHAT, Client
from semel.lab.bench.serving.figures import Row, compared, counted
from semel.lab.bench.serving.images import Size, chat, image_part, text_part
from semel.lab.bench.serving.servers import Server, more_frontends, vllm_with_two_frontends
from semel.lab.bench.serving.socket_bytes import Counts, read_counts
from semel.lab.bench.serving.stages import scrape
from semel.telemetry import metrics

__all__ = ["frontends"]

_WARMING: Final = 12  # so that each API server of vLLM has had the image, whichever the kernel chooses


async def frontends(bench: Bench) -> list[Row]:
    """For servers that are started here: vLLM's again with two API servers, semel's with two more frontends."""
    if bench.launch is None:
        return []
    bench.tell("starting two frontends for each", 0, 1)
    async with vllm_with_two_frontends(bench.launch) as vllm, more_frontends(bench.launch, 2) as semel:
        return await _repeats(bench, Pair(semel, vllm))


async def _repeats(bench: Bench, servers: Pair[Server]) -> list[Row]:
    image = [image_part(bench.images.draw(Size.SQUARE)), text_part("What is this?")]
    body, count = chat(image), bench.effort.short_turns // 2

    async def ask(server: Server, turn: int) -> float:
        # A new connection for each request: the kernel distributes connections among vLLM's API servers.
        async with Client(server.urls[turn % len(server.urls)]) as client:
            return (await client.must(CHAT, body)).seconds * 1e3

    await take_turns(servers, ask, turns=_WARMING)
    before, sent = _counts(servers), await _sent(servers.semel)
    turns = await take_turns(servers, ask, turns=count, on_turn=lambda: bench.tell("repeats, two frontends", 1, 1))
    after, then = _counts(servers), await _sent(servers.semel)

    def per_repeat(part: str) -> tuple[float, float]:
        mine = getattr(after.semel, part) - getattr(before.semel, part)
        theirs = getattr(after.vllm, part) - getattr(before.vllm, part)
        return mine / count, theirs / count

    tensors, by_memory = per_repeat("large_bytes"), (then - sent) / count
    return [
        counted("frontends: tensor bytes between processes, per repeat", "bytes", tensors[0] + by_memory, tensors[1]),
        counted("frontends: all bytes between processes, per repeat", "bytes", *per_repeat("all_bytes")),
        compared("frontends: latency of a repeat, a new connection each", "ms", turns),
    ]


def _counts(servers: Pair[Server]) -> Pair[Counts]:
    assert servers.semel.counts is not None
    assert servers.vllm.counts is not None
    return Pair(read_counts(servers.semel.counts), read_counts(servers.vllm.counts))


async def _sent(server: Server) -> float:
    """Bytes of features that went to the worker through shared memory, which socket counts do not include."""
    total = 0.0
    for url in server.urls:
        async with Client(url) as client:
            total += (await scrape(client)).total(metrics.FEATURE_BYTES_SENT, way="memory")
    return total
