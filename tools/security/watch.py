"""Another tenant's and a probe's view of a server that is attacked, and what its processes use meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from tests.serve.served import sum_of
from tools.security.attacker import CHAT, EMBEDDINGS, chat, image, schema, text
from tools.security.target import Target

__all__ = [
    "Fault",
    "Seen",
    "Victim",
    "is_ready",
    "kill_trial",
    "pool_bytes",
    "stop_engine",
    "stop_supervisor",
    "watch",
]

VICTIM_S: Final = 0.25
PROBE_S: Final = 0.05
UNANSWERED_S: Final = 2.0
"""A chat that is not answered when the watch ends counts as failed if it is older."""

BEGUN_S: Final = 120.0
ENDED_S: Final = 60.0
"""How long an attacker may take to begin, and to end."""


@dataclass
class Seen:
    """The figures while something went on."""

    victim_s: list[float] = field(default_factory=list)
    victim_failures: Counter[str] = field(default_factory=Counter)
    longest_gap_s: float = 0.0
    rss_bytes: int = 0
    """The largest of the HTTP process."""

    pool_bytes: int = 0
    """The largest of the preprocessing processes together."""

    answers: Counter[str] = field(default_factory=Counter)
    """Of the attacker's requests, by status."""

    longest_step_s: float = 0.0
    events_s: dict[str, float] = field(default_factory=dict)
    """When something was seen that was to happen."""

    cpu_s: Mapping[str, float] = field(default_factory=dict)
    """CPU time by role."""

    def p95(self) -> float:
        """Return the 95th percentile of all chats; one without an answer takes for ever."""
        ordered = sorted((*self.victim_s, *(float("inf") for _ in range(self.failures))))
        return ordered[int(0.95 * (len(ordered) - 1))] if ordered else float("inf")

    @property
    def failures(self) -> int:
        return sum(self.victim_failures.values())


@dataclass(frozen=True)
class Victim:
    """A tenant that sends a chat of 16 tokens, or a text to embed, four times a second, each with a text or an image of
    its own."""

    key: str
    body: Callable[[int], dict[str, object]]
    keeps_connections: bool = True
    path: str = CHAT

    @classmethod
    def of(cls, kind: str, key: str) -> Victim:
        """Return a tenant whose chats have texts, new images, or a schema that is new to the server."""
        first = random.randrange(1 << 22)
        if kind == "embedding":
            return cls(key, lambda number: {"input": f"Tell me of {first + number}."}, path=EMBEDDINGS)
        if kind == "image":
            return cls(key, lambda number: chat(image(first + number), text("?"), ignore_eos=True))
        if kind == "schema":
            form = schema({"type": "string", "maxLength": 3_000 + first % 1_000})
            return cls(key, lambda number: chat(text(f"Tell me of {number}."), response_format=form))
        keeps = kind != "new connection"
        return cls(key, lambda number: chat(text(f"Tell me of {first + number}."), ignore_eos=True), keeps)

    async def ask(self, target: Target, seen: Seen) -> None:
        """Send chats, whatever became of those before."""
        begun: dict[int, float] = {}

        async def one(client: httpx.AsyncClient, number: int) -> None:
            try:
                status = (await client.post(self.path, json=self.body(number))).status_code
            except httpx.HTTPError as error:
                seen.victim_failures[type(error).__name__] += 1
            else:
                if status == 200:
                    seen.victim_s.append(time.monotonic() - begun[number])
                else:
                    seen.victim_failures[str(status)] += 1
            del begun[number]

        headers = {"Authorization": f"Bearer {self.key}"}
        limits = httpx.Limits(max_keepalive_connections=None if self.keeps_connections else 0)
        async with httpx.AsyncClient(base_url=target.url, headers=headers, timeout=60, limits=limits) as client:
            try:
                async with asyncio.TaskGroup() as asking:
                    for number in range(sys.maxsize):
                        begun[number] = time.monotonic()
                        asking.create_task(one(client, number))
                        await asyncio.sleep(VICTIM_S)
            finally:
                late = [since for since in begun.values() if time.monotonic() - since > UNANSWERED_S]
                seen.victim_failures["unanswered"] += len(late)


async def probe(target: Target, seen: Seen) -> None:
    """Note the longest time without an answer, and the memory of the HTTP process."""
    last = time.monotonic()

    def look() -> None:
        nonlocal last
        now = time.monotonic()
        seen.longest_gap_s, last = max(seen.longest_gap_s, now - last - PROBE_S), now

    http = target.http_process()
    async with httpx.AsyncClient(base_url=target.url) as client:
        try:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    await client.get(target.probe, timeout=30)
                    look()
                with contextlib.suppress(psutil.Error):
                    seen.rss_bytes = max(seen.rss_bytes, http.memory_info().rss)
                await asyncio.sleep(PROBE_S)
        finally:
            look()


async def watch_pool(target: Target, seen: Seen) -> None:
    """Note the memory of the preprocessing processes."""
    while target.kind == "semel":
        seen.pool_bytes = max(seen.pool_bytes, pool_bytes(target))
        await asyncio.sleep(0.5)


def pool_bytes(target: Target) -> int:
    """Return the memory that preprocessing processes have for themselves."""
    total = 0
    for role, process in target.roles():
        with contextlib.suppress(psutil.Error):
            total += process.memory_info().rss - process.memory_info().shared if role == "pool" else 0
    return total


async def watch_steps(target: Target, seen: Seen) -> None:
    """Note the longest time that the engine took for a step, as its worker sees it: at most one look too short."""
    async with httpx.AsyncClient(base_url=target.worker_url) as client:
        while target.kind == "semel":
            with contextlib.suppress(httpx.HTTPError):
                metrics = (await client.get("/metrics", timeout=30)).text
                seen.longest_step_s = max(seen.longest_step_s, sum_of(metrics, "semel_engine_waited_seconds"))
            await asyncio.sleep(PROBE_S)


def cpu_s(target: Target) -> Mapping[str, float]:
    """Return the CPU time of each process of a server so far, with children that have ended; by role and process id."""
    used = {f"victim {os.getpid()}": time.process_time()}
    for role, process in target.roles():
        with contextlib.suppress(psutil.Error):
            used[f"{role} {process.pid}"] = sum(process.cpu_times()[:4])
    return used


def cpu_between(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """CPU time by role."""
    used: defaultdict[str, float] = defaultdict(float)
    for name, seconds in after.items():
        used[name.partition(" ")[0]] += max(0.0, seconds - before.get(name, 0.0))
    return dict(used)


@contextlib.asynccontextmanager
async def attacking(name: str, target: Target, key: str, seen: Seen) -> AsyncIterator[None]:
    """Let an attack go on meanwhile, in a process of its own."""
    command = (sys.executable, "-m", "tools.security.attacks", name, target.url, key, target.upstream)
    attacker = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert attacker.stdout is not None
    try:
        async with asyncio.timeout(BEGUN_S):
            await attacker.stdout.readline()
        yield
    finally:
        try:
            async with asyncio.timeout(ENDED_S):
                printed, _ = await attacker.communicate(b"")  # closes its standard input
            said = json.loads(printed or "{}")
            seen.answers.update(said.get("answers", {}))
            seen.cpu_s = {**seen.cpu_s, "attacker": said.get("cpu_s", 0.0)}
        finally:
            with contextlib.suppress(ProcessLookupError):
                attacker.kill()


async def stop_engine(target: Target, seen: Seen) -> None:
    """Stop the engine core, and see when that is noticed, and when another one is ready."""
    core, began = target.engine_core(), time.monotonic()
    core.send_signal(signal.SIGSTOP)
    async with httpx.AsyncClient(base_url=target.url, timeout=5) as client:
        for wanted, what in ((False, "noticed"), (True, "ready again")):
            while await is_ready(client, target) is not wanted:  # noqa: ASYNC110 (another process's state)
                await asyncio.sleep(PROBE_S)
            seen.events_s[what] = time.monotonic() - began


async def stop_supervisor(target: Target, _: Seen) -> None:
    """Stop the process that reads the log of the others, until this is cancelled."""
    target.process.send_signal(signal.SIGSTOP)
    try:
        await asyncio.Event().wait()
    finally:
        target.process.send_signal(signal.SIGCONT)


async def kill_trial(target: Target, seen: Seen) -> None:
    """Kill the first fork that tries a grammar, as the system does if memory runs out."""
    began = time.monotonic()
    parents = [process.pid for role, process in target.roles() if role == "grammars"]
    files = [Path(f"/proc/{pid}/task/{pid}/children") for pid in parents]
    while True:
        for file in files:
            for pid in file.read_text().split():
                os.kill(int(pid), signal.SIGKILL)
                seen.events_s["killed"] = time.monotonic() - began
                return
        await asyncio.sleep(0.002)


async def is_ready(client: httpx.AsyncClient, target: Target) -> bool:
    """Ask the probe."""
    try:
        return (await client.get(target.probe)).status_code == 200
    except httpx.HTTPError:
        return False


Fault = Callable[[Target, Seen], Coroutine[Any, Any, None]]


async def watch(
    target: Target, seconds: float, victim: Victim, *, attack: str = "", key: str = "", fault: Fault | None = None
) -> Seen:
    """Let the victim ask for a while, with or without an attack by the tenant of a key, and a fault."""
    seen = Seen()
    async with contextlib.AsyncExitStack() as stack:
        if attack:
            await stack.enter_async_context(attacking(attack, target, key, seen))
            await asyncio.sleep(0.5)
        work = [victim.ask(target, seen), probe(target, seen), watch_steps(target, seen), watch_pool(target, seen)]
        before = cpu_s(target)
        tasks = [asyncio.ensure_future(one) for one in (*([fault(target, seen)] if fault else []), *work)]
        await asyncio.sleep(seconds)
        seen.cpu_s = cpu_between(before, cpu_s(target))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return seen
