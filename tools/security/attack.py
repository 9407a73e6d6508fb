"""The cost of each attack for the server and another tenant: `python -m tools.security.attack` prints a table.

The attacks are valid and expensive requests, or merely rude ones (`attacks`, `review_attacks`). One tenant attacks;
another one sends a chat of 16 tokens four times a second, or a text to a model that embeds; a probe asks `/ready`
(vLLM: `/health`) twenty times a second. Three servers of a tiny model are attacked, one after the other:

- `semel serve` as it is shipped. It keeps its promise if its frontend grows by at most its budget and 256 MiB, no probe
  waits longer than 1 s, no request of the other tenant fails, its p95 is at most twice what it is alone, or that and
  two of the longest engine steps of harmless requests, and the attacker gets no 500. A stopped engine core is noticed
  within 30 s, and replaced.
- The same with the defence switched off that the attack is about (`switches`), or, where that is the equal shares of
  tenants, with one API key for both. Such a line has to show damage.
- Bare vLLM under the same flags.

Below a line that misses a limit, and below those without a defence, is the CPU time of each kind of process. The exit
code is 1 if semel as it is shipped misses a limit. `--only NAME` runs some attacks, `--review` those with a defence of
their own, `--against semel without vllm` chooses servers, `--seconds` is how long each attack lasts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from semel.lab.bench.ports import free_port
from semel.lab.testing.models import build
from tools.security.attacker import BUDGET_BYTES, KEYS, MIB, png_of
from tools.security.attacks import ATTACKS
from tools.security.slow_bucket import slow_bucket
from tools.security.switches import DEFENCES, Switches, environment
from tools.security.target import Target, running
from tools.security.watch import (
    Fault,
    Seen,
    Victim,
    is_ready,
    kill_trial,
    pool_bytes,
    stop_engine,
    stop_supervisor,
    watch,
)

SHIPPED: Final = "semel"
ONE_TENANT: Final = "semel, one tenant"
COLUMNS: Final = (
    *("attack", "against", "HTTP process grows", "longest gap of the probe"),
    *("16 tokens of another tenant, p95", "longest step (harmless)", "the attacker's answers", "promise"),
)
ALONE_S: Final = 5.0
STOPPED_S: Final = 90.0
DOCUMENTS_S: Final = 60.0
"""So long that some of them are answered."""

LOG_S: Final = 12.0
"""As long as a pipe of 64 KiB takes to be full."""

GROWTH_BYTES: Final = BUDGET_BYTES + 256 * MIB
MAX_GAP_S: Final = 1.0
NOTICED_S: Final = 30.0
MAX_FILES: Final = 1_024
FLAGS: Final = ("--media-store", "s3://media/files")
SOON_S: Final = 1.0
SOON_IN_A_ROW: Final = 3
MAX_TRIES: Final = 100
PAUSE_S: Final = 0.1
MAX_LOST: Final = 2
"""Chats that wait for a trial while it is killed."""


@dataclass(frozen=True)
class Row:
    """An attack, and how it is measured."""

    attack: str
    defence: str = ""
    """The one that it is about; without one, the equal shares of tenants."""

    victim: str = "text"
    fault: Fault | None = None
    has_client: bool = True
    on_vllm: bool = True
    max_growth_bytes: int = GROWTH_BYTES
    max_pool_bytes: int = sys.maxsize
    seconds: float = 0.0
    """How long it lasts, if that is fixed."""

    flags: tuple[str, ...] = ()
    """Of a server of its own."""


STOPPED: Final = Row(
    "engine core stopped (`SIGSTOP`)", fault=stop_engine, has_client=False, on_vllm=False, seconds=STOPPED_S
)
KILLED: Final = Row("a trial killed", "verdicts", "schema", kill_trial, has_client=False, on_vllm=False)
POOLING: Final = ("--runner", "pooling", "--convert", "embed")
SPECIAL: Final = (
    Row("3 small images, `min_pixels` 178.9 M", "header", max_pool_bytes=512 * MIB),
    Row("images of 13,000 × 13,000", "reserve", "image"),
    Row("8 documents of 200 pages", victim="image", on_vllm=False, seconds=DOCUMENTS_S),
    Row("regex, expensive to follow", "following"),
    Row("grammar `e e e`", "following"),
    Row("regex, hidden branches", "following"),
    Row("a schema that the engine refuses", "engine verdict"),
    Row("streams that fail on order", "tokens left"),
    Row("700 compressed bodies", "encodings", max_growth_bytes=256 * MIB),
    Row("slow downloads", "downloads", "image", on_vllm=False),
    Row("unknown files, slow bucket", "operations", "new connection", on_vllm=False),
    Row("aborted requests", "aborts"),
    Row("supervisor stopped, strangers", "logs", fault=stop_supervisor, on_vllm=False, seconds=LOG_S),
    KILLED,
    Row("10,000 embeddings, 2,000 a request", victim="embedding", flags=POOLING),
    Row("embeddings on 200 connections", victim="embedding", flags=POOLING),
)
_SPECIAL: Final = {row.attack: row for row in SPECIAL}
ROWS: Final = (*(_SPECIAL.get(name, Row(name)) for name in ATTACKS), STOPPED)


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    row: Row
    against: str
    growth_bytes: int
    seen: Seen
    alone: Seen
    pool_growth_bytes: int = 0

    def cells(self) -> list[str]:
        seen, answered = self.seen, Seen(self.seen.victim_s)
        count = len(seen.victim_s) + seen.failures
        kinds = ", ".join(f"{many} {kind}" for kind, many in seen.victim_failures.most_common(2) if many)
        failed = f"; {seen.failures} of {count} failed: {kinds}" if seen.failures else ""
        answers = ", ".join(f"{count} × {status}" for status, count in seen.answers.most_common(3))
        events = ", ".join(f"{what} after {when:.0f} s" for what, when in seen.events_s.items())
        pool = f", pool {self.pool_growth_bytes / MIB:+,.0f}" if self.row.max_pool_bytes < sys.maxsize else ""
        return [
            self.row.attack,
            self.against,
            f"{self.growth_bytes / MIB:+,.0f} MiB{pool}",
            f"{seen.longest_gap_s:.2f} s",
            f"{f'{answered.p95():.2f} s' if seen.victim_s else 'none'} ({self.alone.p95():.2f} alone{failed})",
            f"{seen.longest_step_s:.2f} s ({self.alone.longest_step_s:.3f})" if seen.longest_step_s else "",
            "; ".join(filter(None, (events, answers))) or "nothing",
            self.verdict(),
        ]

    def cpu(self) -> str:
        """Return the CPU time of each kind of process."""
        used = sorted(self.seen.cpu_s.items(), key=lambda one: -one[1])
        return "CPU seconds: " + ", ".join(f"{role} {seconds:.1f}" for role, seconds in used)

    @property
    def is_undefended(self) -> bool:
        return self.against.startswith("semel without")

    def verdict(self) -> str:
        """Say what was missed; without a defence that is what has to be."""
        missed = ", ".join(self.faults())
        if self.against == SHIPPED:
            return f"not ok: {missed}" if missed else "ok"
        if self.is_undefended:
            return f"damage: {missed}" if missed else "no damage"
        return ""

    def faults(self) -> list[str]:
        """Return what semel does not keep of its promise."""
        seen, alone = self.seen, self.alone
        limit_s = max(2 * alone.p95(), alone.p95() + 2 * alone.longest_step_s)
        kept = {
            "memory": self.growth_bytes <= self.row.max_growth_bytes
            and self.pool_growth_bytes <= self.row.max_pool_bytes,
            "probe": seen.longest_gap_s <= MAX_GAP_S,
            "p95": seen.p95() <= limit_s,
            "failed": not seen.failures,
            "500": not seen.answers["500"] + seen.answers["engine_failed"],
        }
        if self.row is STOPPED:
            kept["p95"] = seen.events_s.get("noticed", NOTICED_S + 1) <= NOTICED_S and "ready again" in seen.events_s
            kept["failed"] = True
        if self.row is KILLED:
            kept["p95"] = Seen(seen.victim_s).p95() <= limit_s
            kept["failed"] = seen.failures == seen.victim_failures["503"] <= MAX_LOST and "killed" in seen.events_s
        return [what for what, is_kept in kept.items() if not is_kept]


async def upstream() -> tuple[asyncio.Server, str]:
    """Start a server that images are fetched from, which means harm too."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            path = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1]
            body, control = b"x", b"max-age=60"
            if path.startswith(b"/spaces"):
                body, control = png_of(1), b" " * 8_000 + b"x"
            head = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nCache-Control: %s\r\nContent-Length: %d\r\n\r\n"
            writer.write(head % (control, len(body)) + body)
            await writer.drain()
        writer.close()

    port = free_port()
    server = await asyncio.start_server(answer, "127.0.0.1", port)
    return server, f"http://127.0.0.1:{port}"


class Server:
    """A server that is started again if it did not survive an attack."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._stack = contextlib.ExitStack()
        self._target: Target | None = None

    async def ready(self) -> Target:
        """Return the server, ready."""
        if self._target is not None and await _survived(self._target):
            return self._target
        await self.close()
        self._target = await asyncio.to_thread(self._stack.enter_context, running(**self._options))
        return self._target

    async def close(self) -> None:
        """End it."""
        await asyncio.to_thread(self._stack.close)

    async def measure(self, row: Row, seconds: float, against: str, attacker: str = "mallory") -> Line:
        """Run an attack by a tenant, after a while of quiet; the others are run also if it cannot be measured."""
        try:
            return await self._measure(row, seconds, against, attacker)
        except (OSError, TimeoutError, psutil.Error, httpx.HTTPError, StopIteration) as error:
            return Line(row, against, 0, Seen(answers=Counter([f"not measured: {error!r}"])), Seen())

    async def _measure(self, row: Row, seconds: float, against: str, attacker: str) -> Line:
        target = await self.ready()
        await settle(target, row.victim)
        victim = Victim.of(row.victim, KEYS["alice"])
        await watch(target, 1.0, Victim.of(row.victim, KEYS["alice"]))
        before, pool_before = target.http_process().memory_info().rss, pool_bytes(target)
        alone = await watch(target, ALONE_S, Victim.of(row.victim, KEYS["alice"]))
        attack = row.attack if row.has_client else ""
        seen = await watch(target, row.seconds or seconds, victim, attack=attack, key=KEYS[attacker], fault=row.fault)
        return Line(row, against, seen.rss_bytes - before, seen, alone, seen.pool_bytes - pool_before)


async def attacked(
    kind: str, model: Path, rows: Sequence[Row], seconds: float, flags: Sequence[str]
) -> AsyncIterator[Line]:
    """Attack one server in all ways."""
    files, url = await upstream()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(files.close)
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        common = {"model": model, "home": home, "upstream_url": url}
        if kind == "vllm":
            server = Server(kind="vllm", flags=flags, **common)
        else:
            variables = stack.enter_context(slow_bucket())
            switches = Switches(home / "switches")
            variables |= environment(home / "switches") if kind == "without" else {}
            server = Server(kind="semel", flags=(*flags, *FLAGS), variables=variables, max_files=MAX_FILES, **common)
        stack.push_async_callback(server.close)
        if kind == "without":
            for row in rows:
                if not row.defence and row is not STOPPED:  # these first: the server knows one tenant
                    yield await server.measure(row, seconds, ONE_TENANT, "alice")
            for row in rows:
                if row.defence:
                    with switches.off(row.defence):
                        yield await server.measure(row, seconds, f"semel without: {DEFENCES[row.defence]}")
            return
        for row in rows:
            if kind == "semel" or row.on_vllm:
                yield await server.measure(row, seconds, SHIPPED if kind == "semel" else "vLLM")


async def settle(target: Target, kind: str) -> None:
    """Wait until the server has nothing left to do for the attack before: three requests in a row are answered soon."""
    victim, soon = Victim.of("embedding" if kind == "embedding" else "text", KEYS["alice"]), 0
    headers = {"Authorization": f"Bearer {victim.key}"}
    async with httpx.AsyncClient(base_url=target.url, headers=headers, timeout=SOON_S) as client:
        for number in range(MAX_TRIES):
            try:
                soon = soon + 1 if (await client.post(victim.path, json=victim.body(number))).status_code == 200 else 0
            except httpx.HTTPError:
                soon = 0
            if soon == SOON_IN_A_ROW:
                return
            await asyncio.sleep(PAUSE_S)


async def _survived(target: Target) -> bool:
    async with httpx.AsyncClient(base_url=target.url, timeout=5) as client:
        for _ in range(120):
            if await is_ready(client, target):
                return True
            await asyncio.sleep(0.5)
    return False


def tell_ejections() -> None:
    """Print how many of four workers failing streams eject: by semel's own rules, under a virtual clock."""
    from semel.fleet.retry_policy import FleetHealth
    from tests.security.test_s31_failures import FAILED, KnowsNoTenants, mean_out

    logging.disable(logging.WARNING)  # each ejection is a line
    for against, kind in ((SHIPPED, FleetHealth), ("semel without: failures count, of any tenant", KnowsNoTenants)):
        out = mean_out(kind, 10, 5, FAILED)
        verdict = "ok" if kind is FleetHealth and not out else f"damage: {out:.1f} of 4 workers"
        cells = (f"{out:.1f} of 4 workers ejected", "10 failing streams/s next to 5 good ones, 600 s", verdict)
        tell("failing streams, a fleet (simulated)", against, *("" for _ in range(3)), *cells)


def tell(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


async def main(arguments: argparse.Namespace) -> int:
    """Run what was chosen; 1 if semel as it is shipped is over a limit."""
    rows = [row for row in ROWS if not arguments.only or any(part in row.attack for part in arguments.only)]
    rows = [row for row in rows if row.defence or not arguments.review]
    failed, flags = False, ("--max-num-seqs", str(arguments.max_num_seqs))
    with tempfile.TemporaryDirectory() as folder:
        model = build("qwen2-vl", Path(folder) / "model")
        tell(*COLUMNS)
        tell(*("---" for _ in COLUMNS))
        servers = product(arguments.against, dict.fromkeys(row.flags for row in rows))
        for kind, own in servers:
            of_server = [row for row in rows if row.flags == own]
            async for line in attacked(kind, model, of_server, arguments.seconds, (*flags, *own)):
                tell(*line.cells())
                if line.is_undefended or (line.against == SHIPPED and line.faults()):
                    tell("", line.cpu(), *("" for _ in COLUMNS[2:]))
                failed |= line.against == SHIPPED and bool(line.faults())
    if any(row.defence == "tokens left" for row in rows) and "without" in arguments.against:
        tell_ejections()
    return int(failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], help="Parts of the names of attacks.")
    parser.add_argument("--review", action="store_true", help="Only those with a defence of their own (S27 to S31).")
    kinds = ["semel", "without", "vllm"]
    parser.add_argument("--against", nargs="*", default=kinds, choices=kinds)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    sys.exit(asyncio.run(main(parser.parse_args())))
