"""What each attack costs the server and another tenant: `python -m tests.security.attack` prints a table.

The attacks are valid and dear requests, or merely rude ones (`attacks`). A real `semel serve` and, in its turn, bare
vLLM under the same flags serve a tiny model. One tenant attacks; another sends a chat of 16 tokens four times a second;
a probe asks `/ready` (vLLM: `/health`) twenty times a second. The table has the growth of the HTTP process, the longest
time without an answer to the probe, and what the other tenant's chats took, beside what they take alone. "one tenant"
is semel with its shares switched off: attacker and victim have the same API key.

`--only NAME` runs some of them, `--against semel vllm` says whom, `--seconds` how long each lasts.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import httpx
import psutil

from semel.bench.ports import free_port
from semel.testing.models import build
from tests.security.attacks import ATTACKS, BUDGET_BYTES, CHAT, KEYS, MIB, chat, picture, text
from tests.serve.served import until

Against = Literal["semel", "vllm"]

FLAGS: Final = (
    *("--enforce-eager", "--dtype", "float32", "--seed", "0"),
    *("--max-model-len", "4096", "--max-num-seqs", "256"),
)
ENVIRONMENT: Final = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
SEMEL_FLAGS: Final = (
    *("--max-media-bytes-in-flight", str(BUDGET_BYTES), "--max-request-media-bytes", str(BUDGET_BYTES // 2)),
    *("--processes", "1", "--allow-media-http", "--allowed-media-networks", "127.0.0.0/8", "--engine-progress-s", "20"),
)
STOPPED: Final = "engine core stopped (`SIGSTOP`)"
COLUMNS: Final = (
    *("attack", "against", "HTTP process grows", "longest gap of the probe"),
    *("16 tokens of another tenant, p95", "the attacker's answers"),
)
VICTIM_S: Final = 0.25
PROBE_S: Final = 0.05
ALONE_S: Final = 5.0
STOPPED_S: Final = 90.0
UNANSWERED_S: Final = 1.0
"""A chat that is not answered when the watch ends counts as failed if it is older."""

GROWTH_BYTES: Final = BUDGET_BYTES + 256 * MIB
MAX_GAP_S: Final = 1.0
START_S: Final = 300.0


@dataclass(frozen=True)
class Target:
    """A running server."""

    kind: Against
    process: subprocess.Popen[bytes]
    url: str
    upstream: str
    metrics_url: str = ""

    @property
    def probe(self) -> str:
        return "/ready" if self.kind == "semel" else "/health"

    def http_process(self) -> psutil.Process:
        """The process that speaks HTTP."""
        process = psutil.Process(self.process.pid)
        if self.kind == "vllm":
            return process
        return next(child for child in process.children() if "frontend" in child.cmdline())

    def engine_core(self) -> psutil.Process:
        family = psutil.Process(self.process.pid).children(recursive=True)
        return next(child for child in family if child.name().startswith("VLLM::Engine"))


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

    note: str = ""

    def p95(self) -> float:
        ordered = sorted(self.victim_s)
        return ordered[int(0.95 * (len(ordered) - 1))] if ordered else float("inf")


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
        printed, _ = await attacker.communicate(b"")  # closes its standard input
        seen.answers.update(json.loads(printed or b"{}"))


async def stop_engine(target: Target, seen: Seen) -> None:
    """Stop the engine core, and see when that is noticed, and when it is mended."""
    core, began = target.engine_core(), time.monotonic()
    core.send_signal(signal.SIGSTOP)
    async with httpx.AsyncClient(base_url=target.url, timeout=5) as client:
        for is_ready, what in ((False, "noticed"), (True, "ready again")):
            while await _is_ready(client, target) is not is_ready:  # noqa: ASYNC110 (another process's state)
                await asyncio.sleep(PROBE_S)
            seen.note += f"{what} after {time.monotonic() - began:.0f} s; "


async def watch(target: Target, seconds: float, key: str, attack: str = "", attacker_key: str = "") -> Seen:
    """Let the victim ask for a while, with or without an attack."""
    seen = Seen()
    async with contextlib.AsyncExitStack() as stack:
        if attack and attack != STOPPED:
            await stack.enter_async_context(attacking(attack, target, attacker_key, seen))
            await asyncio.sleep(2)  # it has to import its libraries
        tasks = [asyncio.create_task(victim(target, key, seen)), asyncio.create_task(probe(target, seen))]
        if attack == STOPPED:
            tasks.append(asyncio.create_task(stop_engine(target, seen)))
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


@contextlib.contextmanager
def running(
    kind: Against,
    model: Path,
    home: Path,
    upstream_url: str,
    *,
    keys: Mapping[str, str] = KEYS,
    flags: Sequence[str] = (),
) -> Iterator[Target]:
    """The server under attack, ready; ended with everything that belongs to it."""
    port, metrics_port = free_port(), free_port()
    if kind == "semel":
        file = home / "keys"
        file.write_text("".join(f"{name} {key}\n" for name, key in keys.items()))
        file.chmod(0o600)
        command = [
            sys.executable,
            "-m",
            "semel",
            "serve",
            str(model),
            *FLAGS,
            *SEMEL_FLAGS,
            "--api-keys-file",
            str(file),
        ]
        command += ["--allowed-media-domains", upstream_url.partition("//")[2], "--metrics-port", str(metrics_port)]
    else:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *FLAGS]
        command += ["--served-model-name", str(model), "--allowed-media-domains", "127.0.0.1"]
    log = home / f"{kind}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *flags, "--host", "127.0.0.1", "--port", str(port)],
            stdout=output,
            stderr=output,
            env=os.environ | ENVIRONMENT | {"TMPDIR": str(home)},
            process_group=0,
        )
    target = Target(kind, process, f"http://127.0.0.1:{port}", upstream_url, f"http://127.0.0.1:{metrics_port}")

    def is_up() -> bool:
        assert process.poll() is None, log.read_text(errors="replace")[-3_000:]
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(target.url + target.probe, timeout=5).status_code == 200
        return False

    family: list[psutil.Process] = []
    try:
        until(is_up, START_S)
        yield target
    finally:
        with contextlib.suppress(psutil.Error):
            family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        for child in family:
            with contextlib.suppress(psutil.Error):
                child.kill()
        process.kill()
        process.wait(10)


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    attack: str
    against: str
    growth_bytes: int
    seen: Seen
    alone: Seen

    def cells(self) -> list[str]:
        failures = sum(self.seen.victim_failures.values())
        count = len(self.seen.victim_s) + failures
        failed = f", {failures} of {count} failed" if failures else ""
        answers = ", ".join(f"{count} × {status}" for status, count in self.seen.answers.most_common(3))
        return [
            self.attack,
            self.against,
            f"{self.growth_bytes / MIB:+,.0f} MiB",
            f"{self.seen.longest_gap_s:.2f} s",
            f"{self.seen.p95():.2f} s ({self.alone.p95():.2f} alone{failed})",
            self.seen.note or answers or "nothing",
        ]

    def is_over(self) -> bool:
        """Whether semel keeps its promise with shares: memory, and a probe that is answered."""
        if self.against != "semel two tenants":
            return False
        return self.growth_bytes > GROWTH_BYTES or self.seen.longest_gap_s > MAX_GAP_S


async def attacked(kind: Against, model: Path, names: Sequence[str], seconds: float) -> AsyncIterator[Line]:
    """Every attack on one server, each after a while of quiet. A server that did not survive one is started again."""
    server, url = await upstream()
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        for mode in ("two tenants", "one tenant") if kind == "semel" else ("",):
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
            key, attacker_key = KEYS["alice"], KEYS["mallory" if mode == "two tenants" else "alice"]
            with contextlib.ExitStack() as its:
                target = await asyncio.to_thread(its.enter_context, running(kind, model, home, url))
                for name in names:
                    if name == STOPPED and mode != "two tenants":
                        continue  # there are no shares in it, and vLLM never notices
                    if not await _survived(target):
                        its.close()
                        target = await asyncio.to_thread(its.enter_context, running(kind, model, home, url))
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
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        model = build("qwen2-vl", Path(folder) / "model")
        tell(*COLUMNS)
        tell(*("---" for _ in COLUMNS))
        for kind in arguments.against:
            async for line in attacked(kind, model, names, arguments.seconds):
                tell(*line.cells())
                failed |= line.is_over()
    return int(failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], help="Parts of the names of attacks.")
    parser.add_argument("--against", nargs="*", default=["semel", "vllm"], choices=["semel", "vllm"])
    parser.add_argument("--seconds", type=float, default=20.0)
    sys.exit(asyncio.run(main(parser.parse_args())))
