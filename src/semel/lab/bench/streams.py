"""Many open streams on one frontend: the lag of its event loop, and the memory per stream.

Real processes over real sockets: a frontend, a worker with an engine without a model that emits tokens at a steady
rate, and a client that checks every token of every stream. The engine emits one token for every request in one step, as
real engines do, so all tokens of a step arrive at once. The baseline of the lag is that of an idle process at the same
time: that part is the machine's, not the frontend's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from semel.errors import ServiceError
from semel.lab.bench.ports import free_port
from semel.lab.bench.report import Check, Report, describe_machine
from semel.lab.bench.settings import StreamsOptions
from semel.telemetry import metrics
from semel.telemetry.lag import LoopLag
from semel.telemetry.meter import Meter
from semel.telemetry.scrape import Scrape, quantile

__all__ = ["StreamsOptions", "run"]

Tell = Callable[[float, str], None]
"""Receives the progress from 0 to 1, and a description of the current work."""

_START_S: Final = 300.0
_END_S: Final = 30.0
_POLL_S: Final = 0.1
_MAX_LAG_S: Final = 0.05
_MAX_DELAY_S: Final = 1.0
_QUICK_STREAMS: Final = 300
_QUICK_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class _Moment:
    """The state of the processes at one moment."""

    lags: dict[float, float]
    idle_lags: dict[float, float]
    """The lags of this process, which is idle."""

    memory_bytes: int
    cpu_s: dict[str, float]
    at_s: float


def run(*, options: StreamsOptions | None = None, quick: bool = False, tell: Tell | None = None) -> Report:
    """Open the streams, and measure the frontend."""
    options = options or StreamsOptions()
    if quick:
        streams = min(options.streams, _QUICK_STREAMS)
        options = StreamsOptions(streams, options.rate, min(options.seconds, _QUICK_S), options.phases)
    checks = asyncio.run(_measure(options, tell or (lambda _, __: None)))
    return Report("streams", describe_machine(), checks)


async def _measure(options: StreamsOptions, tell: Tell) -> tuple[Check, ...]:
    async with contextlib.AsyncExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="semel-bench-")))
        tell(0.02, "building a tiny model")
        await _semel(home, "testing", "model", "qwen2-vl", home / "model")
        await _semel(home, "key", home / "key")
        tell(0.2, "starting a worker and a frontend")
        common = (home / "model", "--fleet-key-file", home / "key", "--drain-delay-s", 0)
        address, port = f"ipc://{home}/worker.sock", free_port()
        flags = ("--listen", address, "--rate", options.rate, "--phases", options.phases)
        worker = await stack.enter_async_context(_started(home, "semel", "testing", "worker", *common, *flags))
        flags = ("--worker", address, "--port", port, "--preprocessing-processes", 1)
        frontend = await stack.enter_async_context(_started(home, "semel", "frontend", *common, *flags))
        url = f"http://127.0.0.1:{port}"
        await _until_ready(home, url, worker, frontend)
        return await _stream(options, tell, home, url, worker, frontend)


async def _stream(
    options: StreamsOptions,
    tell: Tell,
    home: Path,
    url: str,
    worker: asyncio.subprocess.Process,
    frontend: asyncio.subprocess.Process,
) -> tuple[Check, ...]:
    meter = Meter()
    lag = LoopLag(meter)
    idle = await _look(url, meter, {"frontend": frontend.pid})
    tell(0.5, f"opening {options.streams:,} streams")
    figures = map(str, (options.streams, options.tokens, options.rate))
    command = ("semel.lab.bench.stream_client", url, str(home / "model"), *figures)
    async with _started(home, *command) as client:
        assert client.stdout is not None
        pids = {"frontend": frontend.pid, "worker": worker.pid, "client": client.pid}
        async with asyncio.timeout(_START_S + options.tokens / options.rate):
            if (said := await client.stdout.readline()).strip() != b"open":
                raise ServiceError(f"the streams could not be opened: {said.decode(errors='replace')}{_tail(home)}")
            first = await _look(url, meter, pids)
            for second in range(round(options.seconds)):
                tell(0.6 + 0.35 * second / options.seconds, f"{options.streams:,} streams are open")
                await asyncio.sleep(options.seconds / round(options.seconds))
            last = await _look(url, meter, pids)
            lag.close()
            tell(0.95, "the streams end")
            summary = json.loads(await client.stdout.readline())
    return tuple(_checks(options, idle, first, last, summary))


def _checks(
    options: StreamsOptions, idle: _Moment, first: _Moment, last: _Moment, summary: dict[str, Any]
) -> list[Check]:
    lags = {share: (quantile(share, first.lags, last.lags) or 0.0) * 1e3 for share in (0.5, 0.99)}
    base = {share: (quantile(share, first.idle_lags, last.idle_lags) or 0.0) * 1e3 for share in (0.5, 0.99)}
    memory = max(first.memory_bytes, last.memory_bytes) - idle.memory_bytes
    streams, window_s = options.streams, last.at_s - first.at_s
    work_s = last.cpu_s["frontend"] - first.cpu_s["frontend"]
    checks = [
        Check.at_most("event loop lag, p99", lags[0.99], _MAX_LAG_S * 1e3, unit="ms", baseline=base[0.99]),
        Check("event loop lag, p50", lags[0.5], "ms", base[0.5]),
        Check.at_least("streams with every token, in order", summary["complete"], streams, unit="streams"),
        Check.at_most("tokens out of order, streams refused", len(summary["faults"]), 0, unit=""),
        Check("tokens a second", streams * options.rate, "tokens/s"),
        Check("engine to client, p50", summary["delay_p50_s"] * 1e3, "ms"),
        Check("engine to client, p99", summary["delay_p99_s"] * 1e3, "ms"),
        Check.at_most(
            "engine to client, the latest token", summary["delay_max_s"] * 1e3, _MAX_DELAY_S * 1e3, unit="ms"
        ),
        Check("memory of the frontend for a stream", memory / streams / 1024, "KiB"),
        Check("work of the frontend for a token", 1e6 * work_s / (streams * options.rate * window_s), "µs"),
    ]
    for name, spent_s in last.cpu_s.items():
        checks.append(Check(f"cores that the {name} used", (spent_s - first.cpu_s[name]) / window_s, "cores"))
    return checks


async def _look(url: str, meter: Meter, pids: dict[str, int]) -> _Moment:
    text = await asyncio.to_thread(_get, f"{url}/metrics")
    return _Moment(
        Scrape.parse(text).buckets(metrics.LOOP_LAG_SECONDS),
        Scrape.parse(meter.render().decode()).buckets(metrics.LOOP_LAG_SECONDS),
        _memory_bytes(pids["frontend"]),
        {name: _cpu_s(pid) for name, pid in pids.items()},
        asyncio.get_running_loop().time(),
    )


def _memory_bytes(pid: int) -> int:
    """Return the memory of a process; shared pages count by its share."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _semel(home: Path, *arguments: object) -> None:
    async with _started(home, "semel", *arguments) as process, asyncio.timeout(_START_S):
        if await process.wait():
            raise ServiceError(f"`semel {' '.join(map(str, arguments))}` failed:{_tail(home)}")


@contextlib.asynccontextmanager
async def _started(home: Path, module: str, *arguments: object) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a module as a process; it ends with the context."""
    with (home / "log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *map(str, arguments)), stdout=asyncio.subprocess.PIPE, stderr=log
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), _END_S)
            except TimeoutError:
                process.kill()
                await process.wait()


async def _until_ready(home: Path, url: str, *processes: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(_START_S):
        while not await asyncio.to_thread(_is_ready, url):
            if any(process.returncode is not None for process in processes):
                raise ServiceError(f"a process could not start:{_tail(home)}")
            await asyncio.sleep(_POLL_S)


def _is_ready(url: str) -> bool:
    with contextlib.suppress(OSError):
        return bool(_get(f"{url}/ready"))
    return False


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as reply:  # noqa: S310
        return str(reply.read().decode())


def _tail(home: Path) -> str:
    return "\n" + (home / "log").read_text(errors="replace")[-2_000:]
