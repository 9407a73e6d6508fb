"""`semel batch` on batch files whose lines share images: killed again and again, and next to others.

Each batch file has images that no server has seen, so that all runs find cold caches on one server. Requests by hand
are those of as many loops as the batch has in flight, over the same kind of file. `vllm run-batch` starts an engine of
its own; its rate is the one that it prints, without the start.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import secrets
import sys
import tempfile
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final

from semel.batch.run import run_batch
from semel.batch.settings import BatchSettings
from semel.errors import ServiceError
from semel.lab.bench.report import Check, Report, describe_machine
from semel.lab.bench.serving.bench import Tell
from semel.lab.bench.serving.client import CHAT, Client
from semel.lab.bench.serving.images import Images, Size, chat, image_part, text_part
from semel.lab.bench.serving.run import Options, make_launch
from semel.lab.bench.serving.servers import Launch, Server, semel_server
from semel.lab.bench.serving.stages import scrape
from semel.lab.bench.settings import BatchBenchOptions
from semel.telemetry import metrics

__all__ = ["killed", "run", "write_batch"]

_MIN_RATE: Final = 0.95
_TOKENS: Final = 16
_WITHIN_S: Final = 1_800.0
_POLL_S: Final = 0.02
_RATE: Final = re.compile(rb"100% Completed .* ([\d.]+)(req/s|s/req)\]")
_QUICK: Final = BatchBenchOptions(lines=300, images=45, kills=2, rounds=1)


@dataclass(frozen=True, slots=True)
class _Setting:
    options: BatchBenchOptions
    launch: Launch
    server: Server
    client: Client
    images: Images

    def file(self, name: str) -> Path:
        """Write a batch file with new images."""
        path = self.launch.scratch / f"{name}.jsonl"
        write_batch(path, self.images, self.options.lines, self.options.images)
        return path


async def run(options: BatchBenchOptions, tell: Tell, *, quick: bool = False) -> Report:
    """Run it on a tiny model."""
    options = replace(_QUICK, streams=options.streams) if quick else options
    with tempfile.TemporaryDirectory(prefix="semel-bench-", ignore_cleanup_errors=True) as scratch:
        async with AsyncExitStack() as stack:
            launch = await make_launch(Options(), Path(scratch), stack, tell)
            tell("starting the server", 0, 1)
            server = await stack.enter_async_context(semel_server(launch))
            client = await stack.enter_async_context(Client(server.url, connections=options.streams))
            setting = _Setting(options, launch, server, client, Images(secrets.randbits(32)))
            await _by_hand(setting, setting.file("warm-up"))
            checks = [*await _compared(setting, tell), *await _killed(setting, tell)]
    return Report("batch", describe_machine(), tuple(checks))


def write_batch(path: Path, images: Images, lines: int, distinct: int) -> None:
    """Write a batch file: each image is in as many lines, in an order that does not repeat."""
    parts = [image_part(images.draw(Size.MEDIUM)) for _ in range(distinct)]
    numbers = [number % distinct for number in range(lines)]
    random.Random(images.seed).shuffle(numbers)
    with path.open("w") as file:
        for line, number in enumerate(numbers):
            content = [parts[number], text_part(f"Question {line}: what is this?")]
            body = json.loads(chat(content, max_tokens=_TOKENS, ignore_eos=True, return_token_ids=True))
            request = {"custom_id": f"line-{line}", "method": "POST", "url": CHAT, "body": body}
            file.write(json.dumps(request) + "\n")


async def _compared(setting: _Setting, tell: Tell) -> list[Check]:
    by_hand, by_batch = list[float](), list[float]()
    rounds = setting.options.rounds
    for number in range(rounds):
        tell("requests by hand and batches", number, rounds)
        by_hand.append(await _by_hand(setting, setting.file(f"hand-{number}")))
        by_batch.append(await _by_batch(setting, setting.file(f"batch-{number}")))
    ratio = median(mine / theirs for mine, theirs in zip(by_batch, by_hand, strict=True))
    tell("vllm run-batch", 0, 1)
    bare = await _run_batch(setting.launch, setting.file("bare"))
    rate = median(by_batch)
    name = f"next to {setting.options.streams} requests in flight by hand"
    return [
        Check("lines per second", rate, "1/s", median(by_hand)),
        Check.at_least(name, ratio, _MIN_RATE, unit="×"),
        Check("next to vllm run-batch", rate / bare, "×"),
        Check("lines per second of vllm run-batch", bare, "1/s"),
    ]


async def _by_hand(setting: _Setting, path: Path) -> float:
    bodies = iter([json.dumps(request["body"]).encode() for request in _lines(path)])

    async def ask() -> None:
        for body in bodies:
            await setting.client.must(CHAT, body)

    began = perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(setting.options.streams):
            group.create_task(ask())
    return setting.options.lines / (perf_counter() - began)


async def _by_batch(setting: _Setting, path: Path) -> float:
    settings = BatchSettings(path, path.with_suffix(".out"), concurrency=setting.options.streams)
    state = await run_batch(settings, setting.server.url, None, lambda _: None)
    if state.failed:
        raise ServiceError(f"{state.failed} lines failed; the first: {_first_error(settings.output)}")
    return state.done / state.seconds


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def _first_error(output: Path) -> Any:
    return next((one for one in _lines(output) if one["error"] or one["response"]["status_code"] != 200), None)


async def _run_batch(launch: Launch, path: Path) -> float:
    """Return the lines per second of vLLM's own batch command."""
    log = path.with_suffix(".log")
    command = (sys.executable, "-m", "vllm.entrypoints.openai.run_batch", "-i", path, "-o", path.with_suffix(".out"))
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *map(str, (*command, "--model", launch.model, *launch.flags)),
            env=os.environ | {"SEMEL": "0"} | dict(launch.environment),
            stdout=output,
            stderr=output,
        )
        await _ended(process)
    found = _RATE.findall(log.read_bytes())
    if process.returncode or not found:
        raise ServiceError(f"vllm run-batch failed: {log.read_text(errors='replace')[-2_000:]}")
    number, unit = found[-1]
    return float(number) if unit == b"req/s" else 1 / float(number)


async def _killed(setting: _Setting, tell: Tell) -> list[Check]:
    path, lines = setting.file("killed"), setting.options.lines
    before = await _counters(setting)
    tell(f"killing the client {setting.options.kills} times", 0, 1)
    output = await killed(path, setting.server.url, setting.options)
    processed, encoded = (new - old for new, old in zip(await _counters(setting), before, strict=True))
    results = _lines(output)
    counts = Counter(one["custom_id"] for one in results)
    tokens = {one["custom_id"]: _tokens(one["response"]["body"]) for one in results if one["response"]}
    equal = 0
    for number, request in enumerate(_lines(path)):
        tell("the same requests one by one", number, lines)
        single = json.loads((await setting.client.must(CHAT, json.dumps(request["body"]).encode())).body)
        equal += _tokens(single) == tokens.get(request["custom_id"])
    images = setting.options.images
    return [
        Check.at_least("lines with exactly one result", sum(one == 1 for one in counts.values()), lines, unit="lines"),
        Check.at_most("results", len(results), lines, unit="lines"),
        Check.at_least("with the tokens of single requests", equal, lines, unit="lines"),
        Check.at_most("images preprocessed", processed, images, unit="images"),
        Check.at_most("images encoded", encoded, images, unit="images"),
    ]


async def killed(path: Path, url: str, options: BatchBenchOptions) -> Path:
    """Run a batch whose client is killed at random; return the file of its results."""
    output = path.with_suffix(".out")
    command = (sys.executable, "-m", "semel", "batch", path, output, "--base-url", url)
    ends = sorted(random.sample(range(1, options.lines * 9 // 10), options.kills))
    for end in [*ends, None]:
        process = await asyncio.create_subprocess_exec(
            *map(str, command), f"--concurrency={options.streams}", stderr=asyncio.subprocess.DEVNULL
        )
        while end is not None and process.returncode is None and _count(output) < end:  # noqa: ASYNC110 a file
            await asyncio.sleep(_POLL_S)
        if end is not None and process.returncode is None:
            process.kill()
        await _ended(process)
    if process.returncode:
        raise ServiceError(f"semel batch ended with {process.returncode}: {_first_error(output)}")
    return output


async def _ended(process: asyncio.subprocess.Process) -> None:
    try:
        await asyncio.wait_for(process.wait(), _WITHIN_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _count(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _tokens(body: dict[str, Any]) -> list[int]:
    tokens: list[int] = body["choices"][0]["token_ids"]
    return tokens


async def _counters(setting: _Setting) -> tuple[float, float]:
    """Return how many images were preprocessed and encoded."""
    assert setting.server.admin_url is not None
    async with Client(setting.server.admin_url) as worker:
        encoded = (await scrape(worker)).total(metrics.ENCODER_PLANNED)
    return (await scrape(setting.client)).total(metrics.POOL_PROCESSED), encoded
