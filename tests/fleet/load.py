"""A fleet under load: `python -m tests.fleet.load --requests 10000`.

Two workers, three frontends and 120 images on this machine. Every image is asked for alone first; then many requests at
a time, of which a tenth is aborted and a tenth refused, have to be answered exactly so. Exit code 1 if one is not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.fleet.bare import running_bare
from tests.fleet.counters import Counts, settled
from tests.fleet.driving import Driver, Tally, ask_alone
from tests.fleet.plan import Load, pictures, plan
from tests.fleet.processes import Fleet, running_fleet

__all__ = ["drive", "drive_fleet", "main"]

MAX_TOLD = 20


async def drive(urls: list[str], load: Load, *, progress: bool = False) -> Tally:
    """Ask every chat alone, then all that is planned."""
    images = pictures(load.images)
    reference = await ask_alone(urls, load.chats(), images)
    return await Driver(urls, images, reference, at_a_time=load.at_a_time).run(plan(load, len(urls)), progress=progress)


async def drive_fleet(fleet: Fleet, load: Load, *, progress: bool = False) -> tuple[Tally, Counts]:
    """The same through the frontends of a fleet, and what it counted meanwhile, the chats alone left out."""
    images = pictures(load.images)
    frontends, workers = fleet.running_frontends, fleet.running_workers
    reference = await ask_alone(fleet.urls, load.chats(), images)
    before = await asyncio.to_thread(settled, frontends, workers)
    driver = Driver(fleet.urls, images, reference, at_a_time=load.at_a_time)
    tally = await driver.run(plan(load, len(fleet.urls)), progress=progress)
    return tally, await asyncio.to_thread(settled, frontends, workers) - before


def main(words: list[str] | None = None) -> int:
    """Run a load as the command line asks for it, and print what came of it."""
    options = _parser().parse_args(words)
    load = Load(options.requests, seed=options.seed)
    with tempfile.TemporaryDirectory(prefix="semel-model-") as folder:
        model = _model(Path(folder) / "qwen2-vl")
        if options.bare:
            with running_bare(model) as server:
                result = _result(asyncio.run(drive([server.url], load, progress=True)))
        else:
            with running_fleet(model, cache=options.cache) as fleet:
                tally, counts = asyncio.run(drive_fleet(fleet, load, progress=True))
            result = _result(tally) | asdict(counts)
    _print(result, as_json=options.json)
    over_sockets = options.cache == "shared" and result.get("frames_bytes", 0)
    return int(bool(not options.bare and (result["failed"] or over_sockets)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("scripts/load", description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", choices=["shared", "lru"], default="shared", help="the frontends' feature cache")
    parser.add_argument("--bare", action="store_true", help="the same on bare vLLM, one server: the control")
    parser.add_argument("--json", action="store_true")
    return parser


def _model(folder: Path) -> Path:
    from semel.testing.models import build

    return build("qwen2-vl", folder)


def _result(tally: Tally) -> dict[str, Any]:
    for failure in tally.failures[:MAX_TOLD]:
        sys.stderr.write(f"{failure[:400]}\n")
    return {
        "good": tally.good,
        "failed": len(tally.failures),
        "refused": tally.refused,
        "aborted": tally.aborted,
        "seconds": round(tally.seconds, 1),
        "requests_per_second": round(tally.per_second, 1),
    }


def _print(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(f"{json.dumps(result)}\n")
        return
    table = Table("count", "value")
    for name, value in result.items():
        table.add_row(name.replace("_", " "), f"{value:,}")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
