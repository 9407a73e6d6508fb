"""One worker of a fleet fails everything: what clients see of it. Workers are processes, and all go over real sockets.

`python -m tools.fleet.failing [--seconds 60] [--workers 3 6 10] [--rates 20 2] [--rules shipped "ejection off" before]`
prints a table. All answers are streams: those that fail after their first token cannot go to another worker.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import httpx

from semel.cache import LruCache
from semel.fleet.ejection import EjectionLimits
from semel.fleet.fleet import Fleet
from semel.fleet.membership import Membership
from semel.fleet.retry_policy import FleetHealth
from semel.frontend.app import create_app
from semel.frontend.service import FrontendState, ServedModel
from semel.lab.testing.engine import EngineFault
from semel.render import ChatRenderer, ChatTemplate, Tokenizer
from semel.telemetry import Meter
from tests.fleet.test_membership import connect
from tests.render.conftest import PLACEHOLDERS, insertion, write_model
from tests.render.drawn import FEATURE_BYTES, Drawing
from tests.waiting import until
from tests.web.test_server import served
from tests.wire.examples import CONTRACT

RULES = ("shipped", "ejection off", "before")
"""As it is; with `--eject-after-failures 0`; as it was when failures were not load, and only losses went elsewhere."""

FAULTS: Sequence[EngineFault] = ("first_token", "second_token")
PAUSE_S = 0.05
"""Before each of the four tokens of an answer, and before it is taken."""


@dataclass(frozen=True)
class Trial:
    workers: int
    per_s: float
    fault: EngineFault
    rule: str
    seconds: float


@dataclass(frozen=True)
class Seen:
    requests: int
    errors: int
    failed: int
    """Attempts that failed, whether or not another worker answered then."""

    ejections: int


@contextlib.asynccontextmanager
async def worker(folder: Path, fault: str) -> AsyncIterator[str]:
    """The address of a worker in a process of its own."""
    folder.mkdir(mode=0o700)  # noqa: ASYNC240
    address = f"ipc://{folder}/w.sock"
    command = (sys.executable, "-m", "tests.frontend.echo_process", address, str(PAUSE_S), fault)
    process: Process = await asyncio.create_subprocess_exec(*command)
    try:
        yield address
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@contextlib.contextmanager
def rule(name: str, meter: Meter) -> Iterator[Fleet]:
    """A fleet that goes by a rule."""
    fleet = Fleet(health=FleetHealth(EjectionLimits(3 if name == "shipped" else 0), meter=meter))
    with contextlib.ExitStack() as stack:
        if name == "before":
            stack.enter_context(patch("semel.fleet.retry_policy.FleetHealth.load", return_value=0))
            stack.enter_context(patch("semel.fleet.retry_policy.RetryPolicy.is_resumable", return_value=False))
        yield fleet


async def ask(client: httpx.AsyncClient, number: int) -> bool:
    """Return whether a streamed answer came to its end."""
    body = {"messages": [{"role": "user", "content": f"conversation {number}"}], "stream": True}
    answer = await client.post("/v1/chat/completions", json=body)
    return answer.status_code == 200 and '"error"' not in answer.text and answer.text.rstrip().endswith("[DONE]")


async def run(trial: Trial) -> Seen:
    """Ask a fleet of which the first worker fails for so long, at a steady rate."""
    meter = Meter()
    with tempfile.TemporaryDirectory(prefix="semel-failing-") as home, rule(trial.rule, meter) as fleet:
        async with contextlib.AsyncExitStack() as stack:
            members = Membership(fleet, connect)
            stack.push_async_callback(members.close)
            for number in range(trial.workers):
                fault = "" if number else trial.fault
                await members.join(await stack.enter_async_context(worker(Path(home, f"{number}"), fault)))

            async def no_lists() -> AsyncIterator[list[str]]:
                await asyncio.Event().wait()
                yield []

            running = asyncio.create_task(members.run(no_lists()))
            stack.callback(running.cancel)
            await until(lambda: len(fleet.serving) == trial.workers, within_s=60.0)
            state = FrontendState()
            state.begin(ServedModel(fleet, CONTRACT, _drawing(Path(home, "model")).pipeline))
            server = await stack.enter_async_context(served(create_app(state, meter)))
            limits = httpx.Limits(max_connections=256)
            url = f"http://127.0.0.1:{server.port}"
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=30, limits=limits))
            answers = await _drive(client, trial)
    charged = _counted(meter, "semel_failovers_total")
    errors = answers.count(False)
    return Seen(len(answers), errors, round(charged) + errors, round(_counted(meter, "semel_worker_ejections_total")))


async def _drive(client: httpx.AsyncClient, trial: Trial) -> list[bool]:
    tasks = []
    for number in range(round(trial.per_s * trial.seconds)):
        tasks.append(asyncio.create_task(ask(client, number)))
        await asyncio.sleep(1 / trial.per_s)  # what a late machine left out is not sent at once
    return await asyncio.gather(*tasks)


def _drawing(folder: Path) -> Drawing:
    folder.mkdir()
    write_model(folder)
    renderer = ChatRenderer(ChatTemplate.load(folder), Tokenizer.load(folder), PLACEHOLDERS, insertion)
    return Drawing(renderer, LruCache(8 * FEATURE_BYTES))


def _counted(meter: Meter, name: str) -> float:
    return sum(one.value for family in meter.registry.collect() for one in family.samples if one.name == name)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--workers", type=int, nargs="+", default=[3, 6, 10])
    parser.add_argument("--rates", type=float, nargs="+", default=[20.0, 2.0])
    parser.add_argument("--faults", nargs="+", default=FAULTS)
    parser.add_argument("--rules", nargs="+", default=RULES)
    options = parser.parse_args()
    out = sys.stdout.write
    out("| one of | requests/s | fails | rule | requests | clients with an error | failed attempts | ejections |\n")
    out("|---|---|---|---|---|---|---|---|\n")
    for workers in options.workers:
        for per_s in options.rates:
            for fault in options.faults:
                for name in options.rules:
                    seen = asyncio.run(run(Trial(workers, per_s, fault, name, options.seconds)))
                    share = f"{seen.errors:,} ({seen.errors / seen.requests:.1%})"
                    out(f"| {workers} | {per_s:g} | at {fault} | {name} | {seen.requests:,} | {share} | ")
                    out(f"{seen.failed:,} | {seen.ejections} |\n")
                    sys.stdout.flush()


if __name__ == "__main__":
    main()
