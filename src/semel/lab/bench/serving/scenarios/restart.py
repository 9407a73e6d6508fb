"""A worker that is killed and starts again: are images encoded again that the fleet has encoded before?

Every image is asked about twice, so semel's worker publishes it in the embedding store. Then semel's worker and
vLLM's server are killed and started again, and every image is asked about twice once more: the first ask finds an
engine that has never seen it, the second a resident encoder output. The frontend lives on, so it has the feature. A
text that is new each time stands before the image, so no prefix covers it.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final

from semel.errors import ConfigError
from semel.lab.bench.ports import free_port
from semel.lab.bench.serving.alternate import Pair, take_turns
from semel.lab.bench.serving.bench import Bench, Side
from semel.lab.bench.serving.client import CHAT, Client
from semel.lab.bench.serving.figures import Row, counted
from semel.lab.bench.serving.images import Size, chat, image_part, text_part
from semel.lab.bench.serving.scenarios.evicted import Turn, added_rows, worker_metrics
from semel.lab.bench.serving.servers import Server, vllm_again
from semel.telemetry import metrics
from semel.telemetry.meter import Metric
from semel.telemetry.scrape import Scrape

__all__ = ["encoder_inputs", "restart", "restart_flags", "running_store"]

_PUBLISH_S: Final = 60.0
_START_S: Final = 600.0
_POLL_S: Final = 0.2
_MORE_TURNS: Final = 4
"""What a restart adds is milliseconds of a tenth of a second: it takes more turns than a second of encoding."""
_ENCODED: Final = re.compile(r"encoder inputs: (\d+)")
_SERVERS: Final = ("valkey-server", "redis-server")


def restart_flags(store: str) -> tuple[str, ...]:
    """Return the flags of semel's side: an embedding tier, and the fleet's store."""
    return ("--embedding-tier-gb", "1", "--embedding-store", store)


@asynccontextmanager
async def running_store() -> AsyncIterator[str]:
    """A Valkey or Redis on this machine, empty, and its URL. It ends with the block."""
    port = free_port()
    for name in _SERVERS:
        try:
            process = await asyncio.create_subprocess_exec(
                *(name, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"),
                *("--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru"),
                stdout=asyncio.subprocess.DEVNULL,
            )
        except FileNotFoundError:
            continue
        try:
            yield f"redis://127.0.0.1:{port}"
        finally:
            process.terminate()
            await process.wait()
        return
    raise ConfigError(f"--only restart needs a store of encoder outputs: install {' or '.join(_SERVERS)}")


async def restart(bench: Bench) -> list[Row]:
    """Return how many published images are encoded again after a restart, and what the first ask of one takes."""
    if bench.launch is None:
        raise ConfigError("--only restart kills servers, so it starts its own: leave --baseline and --semel out")
    count = _MORE_TURNS * bench.effort.long_turns
    parts = [image_part(bench.images.draw(Size.HD)) for _ in range(count)]
    nonces = iter(range(1_000_000))

    async def ask(side: Side, turn: int) -> Turn:
        took = []
        for _ in range(2):
            new = text_part(f"{bench.images.seed} restart {next(nonces)}")
            answer = await side.client.must(CHAT, chat([new, parts[turn], text_part("What is this?")]))
            took.append(answer.seconds * 1e3)
        return took[0], took[1]

    await bench.turns("images before the restart", ask, turns=count, warming=0)
    await _until(_is_published(bench.sides.semel, count), _PUBLISH_S, "the images were not published")
    await _kill_vllm(bench.sides.vllm.server)
    await _replace_worker(bench.sides.semel)
    async with vllm_again(bench.launch) as server, Client(server.url) as client:
        before = await worker_metrics(bench.sides.semel)
        bench.tell("images after the restart", 0, 1)
        sides = Pair(bench.sides.semel, Side(server, client))
        turns = await take_turns(sides, ask, turns=count)
        after = await worker_metrics(bench.sides.semel)
        encoded = encoder_inputs(server)
    assert before is not None
    assert after is not None
    return [*added_rows("restart: HD", "the restart", turns), *_counts(before, after, encoded)]


def _counts(before: Scrape, after: Scrape, encoded_by_vllm: int) -> list[Row]:
    def since(metric: Metric, **labels: str) -> float:
        return after.total(metric, **labels) - before.total(metric, **labels)

    rows = [
        counted(
            "restart: encodes of published images",
            "",
            since(metrics.ENCODER_PLANNED) - since(metrics.EMBEDDING_LOADS),
            encoded_by_vllm,
        )
    ]
    if calls := since(metrics.EMBEDDING_STORE_CALLS, operation="fetch"):
        fetching = since(metrics.EMBEDDING_STORE_SECONDS, operation="fetch")
        copying = since(metrics.EMBEDDING_LOAD_SECONDS) + since(metrics.EMBEDDING_SAVE_SECONDS)
        rows.append(counted("restart: a fetch from the store, mean", "ms", fetching / calls * 1e3))
        rows.append(counted("restart: a fetch and its copies, mean", "ms", (fetching + copying) / calls * 1e3))
    return rows


def encoder_inputs(server: Server) -> int:
    """Return what vLLM has encoded, as its log tells it of every step."""
    assert server.log is not None
    return sum(map(int, _ENCODED.findall(server.log.read_text(errors="replace"))))


def _is_published(side: Side, count: int) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        found = await worker_metrics(side)
        return found is not None and found.total(metrics.EMBEDDING_PUBLISHED) >= count

    return look


async def _replace_worker(side: Side) -> None:
    """Kill semel's worker with its engine, and wait for the one that is started in its place."""
    roles = side.server.roles()
    killed = {pid for role in ("worker", "engine core", "engine worker") for pid in roles.get(role, ())}
    _kill(killed)

    async def is_back() -> bool:
        workers = set(side.server.roles().get("worker", ()))
        return bool(workers - killed) and await side.client.is_up("/ready")

    await _until(is_back, _START_S, "the worker did not start again")


async def _kill_vllm(server: Server) -> None:
    """Kill vLLM's server; who started it waits for its end."""
    _kill(set(server.pids()))
    await asyncio.sleep(_POLL_S)


def _kill(pids: set[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def _until(condition: Callable[[], Awaitable[bool]], within_s: float, what: str) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while not await condition():
        if loop.time() > deadline:
            raise ConfigError(f"{what} within {within_s:g} s")
        await asyncio.sleep(_POLL_S)
