"""Four tenants, cheap and expensive, at one engine: does each get its share? `python -m tools.security.shares`.

A real `semel serve` on a tiny model, with an API key for each tenant. Each tenant always has more requests under way
than its share of the engine, of its own kind: short chats, long prompts with long answers, images, many answers to
one prompt. The run ends after `--requests`. Printed are, for each tenant, its requests, its tokens, and the smallest
part of an equal share of tokens that it had over any 10 s in which it always had a request waiting; next to it the
frontend's bytes in flight and memory. A prompt counts with its first token: the engine has computed it in the one or
two steps before. Nothing divides a prompt: with up to 2,000 tokens at a time, the simulated engine of `test_turns` has
a least part of 0.64 where 10 s are 16,000 tokens, 0.80 where they are 30,000, and 0.88 where they are 50,000. Exit code
1 if a tenant had less than 0.8 of its share, or the frontend more than its budget. `--one-queue` is the control: the
engine serves in order of arrival (`--disable-tenant-turns`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import httpx
from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector

from semel.lab.testing.models import build
from tests.serve.served import sum_of
from tools.security.attacker import BUDGET_BYTES, CHAT, MIB, chat, image, text
from tools.security.target import Target, running

WINDOW_S: Final = 10.0
WARM_S: Final = 5.0
LEAST: Final = 0.8
AT_A_TIME: Final = 48
"""Requests that each tenant has under way: six times its share of the engine's 32 sequences."""

Draw = Callable[[random.Random], dict[str, Any]]


def short(seed: random.Random) -> dict[str, Any]:
    return chat(text(f"Say {seed.random()}."), max_tokens=seed.randint(1, 16))


def long(seed: random.Random) -> dict[str, Any]:
    words = " ".join(str(seed.randrange(10)) for _ in range(seed.randint(200, 1_000)))
    return chat(text(words), max_tokens=seed.randint(64, 256), ignore_eos=True)


def images(seed: random.Random) -> dict[str, Any]:
    return chat(image(seed.randrange(40), 112), text(f"{seed.random()}?"), max_tokens=seed.randint(8, 64))


def wide(seed: random.Random) -> dict[str, Any]:
    return chat(text(f"{seed.random()}"), n=seed.randint(2, 8), max_tokens=seed.randint(8, 32), temperature=1.0)


KINDS: Final[dict[str, Draw]] = {"short": short, "long": long, "images": images, "wide": wide}


@dataclass
class Tenant:
    """The share that one tenant got."""

    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=lambda: [0])
    """At each of those times, and before: of prompts that began, and of answers as they came."""

    answers: Counter[str] = field(default_factory=Counter)
    waiting: int = 0
    """Requests that have no token yet."""

    silences: list[tuple[float, float]] = field(default_factory=list)
    """When it had none."""

    since: float = 0.0

    def get(self, tokens: int) -> None:
        self.times.append(time.monotonic())
        self.tokens.append(self.tokens[-1] + tokens)

    def wait(self) -> None:
        if not self.waiting:
            self.silences.append((self.since, time.monotonic()))
        self.waiting += 1

    def begin(self) -> None:
        self.waiting -= 1
        self.since = time.monotonic()

    def between(self, start: float, end: float) -> int:
        return self.tokens[bisect_left(self.times, end)] - self.tokens[bisect_left(self.times, start)]

    def always_waits(self, start: float, end: float) -> bool:
        return all(until <= start or since >= end for since, until in self.silences)


@dataclass
class Run:
    """All that was seen."""

    left: int
    tenants: dict[str, Tenant]
    began: float = 0.0
    ended: float = 0.0
    bytes_in_flight: float = 0.0
    rss_bytes: int = 0

    def least_share(self, name: str) -> tuple[float, int]:
        """Return the smallest part of an equal share of tokens over any 10 s, and that share."""
        shares, start = [], self.began + WARM_S
        while (end := start + WINDOW_S) <= self.ended:
            if self.tenants[name].always_waits(start, end):
                every = {each: tenant.between(start, end) for each, tenant in self.tenants.items()}
                share = max(1, sum(every.values()) // len(every))
                shares.append((every[name] / share, share))
            start += 0.5
        return min(shares, default=(float("nan"), 0))


async def ask(session: ClientSession, url: str, body: dict[str, Any], tenant: Tenant) -> None:
    """Stream one answer, and note the tokens as they come."""
    stream = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    is_waiting = True
    tenant.wait()
    try:
        async with session.post(url, json=body | stream) as reply:
            tenant.answers[str(reply.status)] += 1
            if reply.status != HTTPStatus.OK:
                await asyncio.sleep(0.2)
                return
            seen: Counter[int] = Counter()
            async for line in reply.content:
                if not line.startswith(b"data: {") or not (chunk := json.loads(line[6:])).get("choices"):
                    continue
                index, usage = chunk["choices"][0]["index"], chunk["usage"]
                if not usage["completion_tokens"]:
                    continue
                if is_waiting:
                    is_waiting = False
                    tenant.begin()
                    tenant.get(usage["prompt_tokens"])
                tenant.get(usage["completion_tokens"] - seen[index])
                seen[index] = usage["completion_tokens"]
    except (ClientError, TimeoutError) as error:
        tenant.answers[type(error).__name__] += 1
    finally:
        if is_waiting:
            tenant.begin()


async def keep_asking(target: Target, key: str, draw: Draw, tenant: Tenant, run: Run, seed: random.Random) -> None:
    """As many requests at a time as a tenant has, until there are none left."""
    headers, connector = {"Authorization": f"Bearer {key}"}, TCPConnector(limit=AT_A_TIME)

    async def one(session: ClientSession) -> None:
        while run.left > 0:
            run.left -= 1
            await ask(session, target.url + CHAT, draw(seed), tenant)
        run.ended = run.ended or time.monotonic()

    async with ClientSession(headers=headers, connector=connector, timeout=ClientTimeout(600)) as session:
        await asyncio.gather(*(one(session) for _ in range(AT_A_TIME)))


async def observe(target: Target, run: Run) -> None:
    """The frontend's bytes in flight, and its memory."""
    async with httpx.AsyncClient(base_url=target.metrics_url) as client:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                metrics = (await client.get("/metrics", timeout=10)).text
                run.bytes_in_flight = max(run.bytes_in_flight, sum_of(metrics, "semel_media_in_flight_bytes"))
            run.rss_bytes = max(run.rss_bytes, target.http_process().memory_info().rss)
            await asyncio.sleep(0.5)


def key_of(name: str) -> str:
    return f"{name}-0123456789abcdef"


async def drive(target: Target, requests: int) -> Run:
    """Let all tenants ask at the same time."""
    run = Run(requests, {name: Tenant() for name in KINDS}, began=time.monotonic())
    observing = asyncio.create_task(observe(target, run))
    try:
        await asyncio.gather(
            *(
                keep_asking(target, key_of(name), draw, run.tenants[name], run, random.Random(name))
                for name, draw in KINDS.items()
            )
        )
    finally:
        observing.cancel()
    return run


def tell(line: str) -> None:
    print(line, flush=True)


async def main(arguments: argparse.Namespace) -> int:
    """Run it; 1 if a tenant had too little, or the frontend too much."""
    flags = ("--max-num-seqs", "32", *(("--disable-tenant-turns",) if arguments.one_queue else ()))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        model = build("qwen2-vl", Path(folder) / "model")
        keys = {name: key_of(name) for name in KINDS}
        with running("semel", model, Path(folder), "http://127.0.0.1:1", keys=keys, flags=flags) as target:
            before = target.http_process().memory_info().rss
            run = await drive(target, arguments.requests)
            growth = run.rss_bytes - before
    tell("| tenant | answers | tokens | least part of an equal share over 10 s |\n|---|---|---|---|")
    shares = {name: run.least_share(name) for name in KINDS}
    for name, tenant in run.tenants.items():
        answers = ", ".join(f"{count:,} × {status}" for status, count in tenant.answers.most_common(3))
        least, share = shares[name]
        tell(f"| {name} | {answers} | {tenant.tokens[-1]:,} | {least:.2f} of {share:,} tokens |")
    in_flight = f"at most {run.bytes_in_flight / MIB:.1f} MiB of {BUDGET_BYTES / MIB:.0f} in flight"
    tell(f"\n{arguments.requests:,} requests in {run.ended - run.began:.0f} s; {in_flight}, {growth / MIB:+.0f} MiB")
    is_over = run.bytes_in_flight > BUDGET_BYTES or growth > BUDGET_BYTES + 256 * MIB
    return int(is_over or not all(least >= LEAST for least, _ in shares.values()))  # none measured: not a number


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--one-queue", action="store_true", help="The control: no turns of tenants at the engine.")
    sys.exit(asyncio.run(main(parser.parse_args())))
