"""What each attack costs the server and another tenant: `python -m tests.security.attack` prints a table.

The attacks are valid and dear requests, or merely rude ones (`attacks`). A real `semel serve` and, in its turn, bare
vLLM under the same flags serve a tiny model. One tenant attacks; another sends a chat of 16 tokens four times a second;
a probe asks `/ready` (vLLM: `/health`) twenty times a second. The table has the growth of the HTTP process, the longest
time without an answer to the probe, what the other tenant's chats took, beside what they take alone, and the longest
time that the engine took for a step while requests were under way. "one tenant" is semel with its shares switched off:
attacker and victim have the same API key.

Semel with shares keeps its promise if its frontend grows by at most its budget and 256 MiB, no probe waits longer than
1 s, and the p95 of the other tenant is at most twice what it is alone, or that and two of the longest steps. A stopped
engine core is noticed within 30 s, and replaced. The exit code is 1 if a line says "not ok".

`--only NAME` runs some of them, `--against semel vllm` says whom, `--seconds` how long each lasts.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx
import psutil

from semel.bench.ports import free_port
from semel.testing.models import build
from tests.security.attacks import ATTACKS, BUDGET_BYTES, CHAT, KEYS, MIB, chat, picture, text
from tests.security.target import Against, Target, running
from tests.serve.served import sum_of

STOPPED: Final = "engine core stopped (`SIGSTOP`)"
COLUMNS: Final = (
    *("attack", "against", "HTTP process grows", "longest gap of the probe"),
    *("16 tokens of another tenant, p95", "longest step", "the attacker's answers", "promise"),
)
VICTIM_S: Final = 0.25
PROBE_S: Final = 0.05
ALONE_S: Final = 8.0
STOPPED_S: Final = 90.0
UNANSWERED_S: Final = 2.0
"""A chat that is not answered when the watch ends counts as failed if it is older."""

GROWTH_BYTES: Final = BUDGET_BYTES + 256 * MIB
MAX_GAP_S: Final = 1.0
NOTICED_S: Final = 30.0
ENDED_S: Final = 60.0
"""How long an attacker may take to end."""


@dataclass
class Seen:
    """What was seen while something went on."""

    victim_s: list[float] = field(default_factory=list)
    victim_failures: Counter[str] = field(default_factory=Counter)
    longest_gap_s: float = 0.0
    rss_bytes: int = 0
    """The largest."""

    answers: Counter[str] = field(default_factory=Counter)
    """Of the attacker's requests, by status."""

    longest_step_s: float = 0.0
    events_s: dict[str, float] = field(default_factory=dict)
    """When something was seen that was to happen."""

    def p95(self) -> float:
        """Of all chats; one without an answer takes for ever."""
        ordered = sorted((*self.victim_s, *(float("inf") for _ in range(self.failures))))
        return ordered[int(0.95 * (len(ordered) - 1))] if ordered else float("inf")

    @property
    def failures(self) -> int:
        return sum(self.victim_failures.values())


async def victim(target: Target, key: str, seen: Seen) -> None:
    """Four chats a second, each with a text of its own, whatever became of those before."""
    begun: dict[int, float] = {}

    async def one(client: httpx.AsyncClient, number: int) -> None:
        body = chat(text(f"Tell me of {number}."), ignore_eos=True)
        try:
            status = (await client.post(CHAT, json=body)).status_code
        except httpx.HTTPError as error:
            seen.victim_failures[type(error).__name__] += 1
        else:
            if status == 200:
                seen.victim_s.append(time.monotonic() - begun[number])
            else:
                seen.victim_failures[str(status)] += 1
        del begun[number]

    headers = {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=target.url, headers=headers, timeout=60) as client:
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
    """The longest time without an answer, and the memory of the HTTP process."""
    last = time.monotonic()
    async with httpx.AsyncClient(base_url=target.url) as client:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                await client.get(target.probe, timeout=30)
            now = time.monotonic()
            seen.longest_gap_s, last = max(seen.longest_gap_s, now - last - PROBE_S), now
            with contextlib.suppress(psutil.Error, StopIteration):
                seen.rss_bytes = max(seen.rss_bytes, target.http_process().memory_info().rss)
            await asyncio.sleep(PROBE_S)


async def watch_steps(target: Target, seen: Seen) -> None:
    """The longest time that the engine took for a step, as its worker sees it: at most one look too short."""
    async with httpx.AsyncClient(base_url=target.worker_url) as client:
        while target.kind == "semel":
            with contextlib.suppress(httpx.HTTPError):
                metrics = (await client.get("/metrics", timeout=30)).text
                seen.longest_step_s = max(seen.longest_step_s, sum_of(metrics, "semel_engine_waited_seconds"))
            await asyncio.sleep(PROBE_S)


@contextlib.asynccontextmanager
async def attacking(name: str, target: Target, key: str, seen: Seen) -> AsyncIterator[None]:
    """An attack goes on meanwhile, in a process of its own."""
    command = (sys.executable, "-m", "tests.security.attacks", name, target.url, key, target.upstream)
    attacker = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        try:
            async with asyncio.timeout(ENDED_S):
                printed, _ = await attacker.communicate(b"")  # closes its standard input
            seen.answers.update(json.loads(printed or b"{}"))
        finally:
            with contextlib.suppress(ProcessLookupError):
                attacker.kill()


async def stop_engine(target: Target, seen: Seen) -> None:
    """Stop the engine core, and see when that is noticed, and when it is mended."""
    core, began = target.engine_core(), time.monotonic()
    core.send_signal(signal.SIGSTOP)
    async with httpx.AsyncClient(base_url=target.url, timeout=5) as client:
        for is_ready, what in ((False, "noticed"), (True, "ready again")):
            while await _is_ready(client, target) is not is_ready:  # noqa: ASYNC110 (another process's state)
                await asyncio.sleep(PROBE_S)
            seen.events_s[what] = time.monotonic() - began


async def watch(target: Target, seconds: float, key: str, attack: str = "", attacker_key: str = "") -> Seen:
    """Let the victim ask for a while, with or without an attack."""
    seen = Seen()
    async with contextlib.AsyncExitStack() as stack:
        if attack and attack != STOPPED:
            await stack.enter_async_context(attacking(attack, target, attacker_key, seen))
            await asyncio.sleep(2)  # it has to import its libraries
        work = [victim(target, key, seen), probe(target, seen), watch_steps(target, seen)]
        if attack == STOPPED:
            work.append(stop_engine(target, seen))
        tasks = [asyncio.create_task(one) for one in work]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return seen


async def upstream() -> tuple[asyncio.Server, str]:
    """A server that images are fetched from, which means harm too."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            path = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1]
            body, control = b"x", b"max-age=60"
            if path.startswith(b"/spaces"):
                body, control = base64.b64decode(picture(1)["image_url"]["url"].partition(",")[2]), b" " * 8_000 + b"x"
            head = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nCache-Control: %s\r\nContent-Length: %d\r\n\r\n"
            writer.write(head % (control, len(body)) + body)
            await writer.drain()
        writer.close()

    port = free_port()
    server = await asyncio.start_server(answer, "127.0.0.1", port)
    return server, f"http://127.0.0.1:{port}"


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    attack: str
    against: str
    growth_bytes: int
    seen: Seen
    alone: Seen

    def cells(self) -> list[str]:
        seen, answered = self.seen, Seen(self.seen.victim_s)
        count = len(seen.victim_s) + seen.failures
        failed = f", {seen.failures} of {count} failed" if seen.failures else ""
        answers = ", ".join(f"{count} × {status}" for status, count in seen.answers.most_common(3))
        events = ", ".join(f"{what} after {when:.0f} s" for what, when in seen.events_s.items())
        return [
            self.attack,
            self.against,
            f"{self.growth_bytes / MIB:+,.0f} MiB",
            f"{seen.longest_gap_s:.2f} s",
            f"{f'{answered.p95():.2f} s' if seen.victim_s else 'none'} ({self.alone.p95():.2f} alone{failed})",
            f"{seen.longest_step_s:.2f} s" if seen.longest_step_s else "",
            events or answers or "nothing",
            "" if self.against != "semel two tenants" else "; ".join(self.faults()) or "ok",
        ]

    def faults(self) -> list[str]:
        """What semel with shares does not keep of its promise."""
        seen, alone_s = self.seen, self.alone.p95()
        kept = {
            "memory": self.growth_bytes <= GROWTH_BYTES,
            "probe": seen.longest_gap_s <= MAX_GAP_S,
            "p95": seen.p95() <= max(2 * alone_s, alone_s + 2 * seen.longest_step_s),
        }
        if self.attack == STOPPED:
            kept["p95"] = seen.events_s.get("noticed", NOTICED_S + 1) <= NOTICED_S and "ready again" in seen.events_s
        return [f"not ok: {what}" for what, is_kept in kept.items() if not is_kept]


async def attacked(
    kind: Against, model: Path, names: Sequence[str], seconds: float, flags: Sequence[str]
) -> AsyncIterator[Line]:
    """Every attack on one server, each after a while of quiet. A server that did not survive one is started again."""
    server, url = await upstream()
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        for mode in ("two tenants", "one tenant") if kind == "semel" else ("",):
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
            key, attacker_key = KEYS["alice"], KEYS["mallory" if mode == "two tenants" else "alice"]
            with contextlib.ExitStack() as its:
                target = await asyncio.to_thread(its.enter_context, running(kind, model, home, url, flags=flags))
                for name in names:
                    if name == STOPPED and mode != "two tenants":
                        continue  # there are no shares in it, and vLLM never notices
                    if not await _survived(target):
                        its.close()
                        target = await asyncio.to_thread(
                            its.enter_context, running(kind, model, home, url, flags=flags)
                        )
                    await watch(target, 2, key)
                    before = target.http_process().memory_info().rss
                    alone = await watch(target, ALONE_S, key)
                    seen = await watch(target, STOPPED_S if name == STOPPED else seconds, key, name, attacker_key)
                    yield Line(name, f"{kind} {mode}".strip(), seen.rss_bytes - before, seen, alone)


async def _survived(target: Target) -> bool:
    async with httpx.AsyncClient(base_url=target.url, timeout=5) as client:
        for _ in range(120):
            if await _is_ready(client, target):
                return True
            await asyncio.sleep(0.5)
    return False


async def _is_ready(client: httpx.AsyncClient, target: Target) -> bool:
    try:
        return (await client.get(target.probe)).status_code == 200
    except httpx.HTTPError:
        return False


def tell(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)  # noqa: T201


async def main(arguments: argparse.Namespace) -> int:
    """Run what was chosen; 1 if semel with shares is over a bound."""
    every = [*ATTACKS, STOPPED]
    names = [name for name in every if not arguments.only or any(part in name for part in arguments.only)]
    failed, flags = False, ("--max-num-seqs", str(arguments.max_num_seqs))
    with tempfile.TemporaryDirectory() as folder:
        model = build("qwen2-vl", Path(folder) / "model")
        tell(*COLUMNS)
        tell(*("---" for _ in COLUMNS))
        for kind in arguments.against:
            async for line in attacked(kind, model, names, arguments.seconds, flags):
                tell(*line.cells())
                failed |= line.against == "semel two tenants" and bool(line.faults())
    return int(failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], help="Parts of the names of attacks.")
    parser.add_argument("--against", nargs="*", default=["semel", "vllm"], choices=["semel", "vllm"])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    sys.exit(asyncio.run(main(parser.parse_args())))
