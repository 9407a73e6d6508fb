"""A fleet under load: `python -m tools.fleet.load --requests 10000`.

Two workers, three frontends and 120 images on this machine. Every image is asked for alone first; then many requests at
a time, of which a tenth is aborted and a tenth refused, have to be answered exactly so. Exit code 1 if one is not.

With `--compare` the requests are for images that come again (`--repeats`), none is aborted or refused, and they go
through frontends that choose workers as semel does and, in turns, through others that ask one worker after another.
Exit code 1 if a request fails, or if semel's fleet encodes an image more than 1.2 times on average (issue 8).
With `--transport tcp` workers are reached over tcp, encrypted, and with `--transports` both are measured in turns.
With `--store` the workers share their encoder outputs in a Redis that is started for the run. "Again" in the table are
preprocessings of images that were preprocessed before, by cause (`semel.lab.simulate.repeats`). With `--record FILE`
the requests and what was measured are written for `semel simulate --against FILE`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from semel.lab.bench.ports import free_port
from semel.lab.bench.serving.scenarios.restart import restart_flags
from semel.lab.prove.bare import running_bare
from semel.lab.prove.counters import Counts, settled
from semel.lab.prove.processes import Fleet, running_fleet
from tests.embeddings.redis import running_redis
from tools.fleet.comparing import ROOMY_GB, Figures, begin_rivals, compare
from tools.fleet.driving import Driver, Tally, ask_alone, exchange, token_ids
from tools.fleet.plan import SIDE, TOKENS, Ask, Load, Repeats, body_of, draw_images, plan, plan_repeats
from tools.fleet.transports import begin_paths, measure

__all__ = ["drive", "drive_fleet", "drive_rivals", "main"]

MAX_SHOWN = 20
MAX_ENCODES = 1.2
"""Per image, by all workers of a fleet whose frontends choose as semel does (issue 8); round robin makes more."""

TOKEN_SIDE = 28
"""Pixels of a side that one token of Qwen2-VL stands for."""


async def drive(urls: list[str], load: Load, *, progress: bool = False) -> Tally:
    """Ask every chat alone, then all that is planned."""
    images = draw_images(load.images)
    reference = await ask_alone(urls, load.chats(), images)
    return await Driver(urls, images, reference, at_a_time=load.at_a_time).run(plan(load, len(urls)), progress=progress)


async def drive_fleet(
    fleet: Fleet, load: Load, *, progress: bool = False, compared: Callable[[Any], Any] | None = None
) -> tuple[Tally, Counts]:
    """Send the same through the frontends of a fleet; return the results and its counters, without the chats alone."""
    images = draw_images(load.images)
    frontends, workers = fleet.running_frontends, fleet.running_workers
    reference = await ask_alone(fleet.urls, load.chats(), images, compared=compared)
    before = await asyncio.to_thread(settled, frontends, workers)
    driver = Driver(fleet.urls, images, reference, at_a_time=load.at_a_time, compared=compared)
    tally = await driver.run(plan(load, len(fleet.urls)), progress=progress)
    return tally, await asyncio.to_thread(settled, frontends, workers) - before


async def drive_rivals(fleet: Fleet, load: Repeats, *, frontends: int, rounds: int) -> dict[str, Figures]:
    """Repeats through frontends that choose as semel does, and through others that ask one worker after another."""
    rivals = await asyncio.to_thread(begin_rivals, fleet, frontends)
    return await compare(fleet, rivals, load, rounds=rounds)


def main(words: list[str] | None = None) -> int:
    """Run a load as the command line asks for it, and print what came of it."""
    options = _parser().parse_args(words)
    with tempfile.TemporaryDirectory(prefix="semel-model-") as folder:
        model = _model(Path(folder) / "qwen2-vl")
        if options.compare:
            return _compare(model, options)
        if options.transports:
            return _transports(model, options)
        # Without an engine nothing is refused that only an engine refuses.
        load = Load(options.requests, seed=options.seed, refused=0.0 if options.without_engines else 0.1)
        if options.bare:
            with running_bare(model) as server:
                result = _result(asyncio.run(drive([server.url], load, progress=True)))
        else:
            workers, frontends = options.workers or 2, options.frontends or 3
            kind = {"cache": options.cache, "transport": options.transport}
            engines, compared = (False, token_ids) if options.without_engines else (True, None)
            with running_fleet(model, **kind, workers=workers, frontends=frontends, has_engines=engines) as fleet:
                tally, counts = asyncio.run(drive_fleet(fleet, load, progress=True, compared=compared))
            result = _result(tally) | asdict(counts)
    _print({"value": result}, as_json=options.json)
    by_memory = options.cache == "shared" and options.transport == "ipc"
    over_sockets = by_memory and result.get("frames_bytes", 0)
    return int(bool(not options.bare and (result["failed"] or over_sockets)))


def _compare(model: Path, options: argparse.Namespace) -> int:
    """Compare semel's choice with round robin's; fail if it lets an image be encoded more than `MAX_ENCODES` times."""
    clients, burst = options.clients, options.burst
    load = Repeats(
        options.requests, options.repeats, tokens=options.tokens, at_a_time=clients, burst=burst, seed=options.seed
    )
    workers = options.workers or 3
    with (
        _store(options) as flags,
        running_fleet(model, workers=workers, frontends=0, item_cache_gb=ROOMY_GB, worker_flags=flags) as fleet,
    ):
        rivals = drive_rivals(fleet, load, frontends=options.frontends or 2, rounds=options.rounds)
        found = asyncio.run(rivals)
        prompt_tokens = asyncio.run(_prompt_tokens(fleet.urls[0])) if options.record else 0
    if options.record:
        options.record.write_text(json.dumps(_recorded(load, options, workers, found["semel"], prompt_tokens)))
    for failure in (failures := _failures(found))[:MAX_SHOWN]:
        sys.stderr.write(f"{failure[:400]}\n")
    _print({name: figures.table() for name, figures in found.items()}, as_json=options.json)
    return int(bool(failures))


def _failures(found: Mapping[str, Figures]) -> list[str]:
    """Return the requests that failed, after the encodes of semel's fleet if they are too many."""
    failures = [one for figures in found.values() for one in figures.failures]
    if (encodes := found["semel"].encodes_per_image) > MAX_ENCODES:
        failures.insert(0, f"semel's fleet made {encodes:.3f} encodes per image; at most {MAX_ENCODES:g} are allowed")
    return failures


async def _prompt_tokens(url: str) -> int:
    """Of a prompt with one image, as the model counts them."""
    _, answer = await exchange(url, body_of(Ask((0,), 0), draw_images(1)))
    return int(answer["usage"]["prompt_tokens"])


def _recorded(
    load: Repeats, options: argparse.Namespace, workers: int, figures: Figures, prompt_tokens: int
) -> dict[str, Any]:
    frontends, measured = options.frontends or 2, figures.measured()
    rounds = [plan_repeats(replace(load, seed=load.seed + number), frontends) for number in range(options.rounds)]
    return {
        "frontends": frontends,
        "workers": workers,
        "clients": load.at_a_time,
        "answer_tokens": load.tokens,
        "prompt_tokens": prompt_tokens,
        "image": {
            "width": SIDE,
            "height": SIDE,
            "tokens": (SIDE // TOKEN_SIDE) ** 2,
            "nbytes": round(measured["feature_bytes"] / measured["features_sent"]),
        },
        "rounds": [[[ask.chat[0], ask.frontend] for ask in asks] for asks in rounds],
        "measured": measured,
    }


def _transports(model: Path, options: argparse.Namespace) -> int:
    """tcp next to ipc, in turns."""
    with running_fleet(model, workers=0, frontends=0) as fleet:
        paths = begin_paths(fleet, has_engines=not options.without_engines)
        measuring = measure(paths, rounds=options.rounds, new=24, repeats=40, seed=options.seed)
        found = asyncio.run(measuring)
    _print({name: figures.table() for name, figures in found.items()}, as_json=options.json)
    return int(any(figures.failed for figures in found.values()))


@contextmanager
def _store(options: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """The flags of workers that share their encoder outputs, and the store in which they do; none without --store."""
    if options.store_down:
        yield restart_flags(f"valkey://127.0.0.1:{free_port()}")
        return
    if not options.store:
        yield ()
        return
    with tempfile.TemporaryDirectory(prefix="semel-store-") as home, running_redis(Path(home)) as redis:
        publish_after = str(options.publish_after)
        yield (*restart_flags(redis.url), "--embedding-publish-min-requests", publish_after)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("scripts/load", description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, help="2 unless given; 3 with --compare")
    parser.add_argument("--frontends", type=int, help="3 unless given; with --compare 2, and as many of the others")
    parser.add_argument("--cache", choices=["shared", "lru"], default="shared", help="the frontends' feature cache")
    parser.add_argument("--transport", choices=["ipc", "tcp"], default="ipc", help="tcp is encrypted")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--bare", action="store_true", help="the same on bare vLLM, one server: the control")
    parser.add_argument("--compare", action="store_true", help="semel's choice of workers next to round robin's")
    parser.add_argument("--transports", action="store_true", help="tcp next to ipc, in turns, on an engine each")
    parser.add_argument("--without-engines", action="store_true", help="workers have no model, and refuse nothing")
    comparing = parser.add_argument_group("with --compare")
    comparing.add_argument("--repeats", type=float, default=0.8, help="the share of requests whose image came before")
    comparing.add_argument("--burst", type=float, default=0.0, help="the share of repeats that show the newest image")
    comparing.add_argument("--clients", type=int, default=8, help="requests at a time")
    comparing.add_argument("--tokens", type=int, default=TOKENS, help="of every answer")
    comparing.add_argument("--store", action="store_true", help="workers share encoder outputs in a Redis")
    comparing.add_argument("--store-down", action="store_true", help="they have a store that does not answer")
    comparing.add_argument("--publish-after", type=int, default=2, help="asks after which an output is shared")
    comparing.add_argument("--record", type=Path, help="write the requests and the figures of semel's choice here")
    comparing.add_argument("--rounds", type=int, default=4, help="how often both get the requests, in turns")
    return parser


def _model(folder: Path) -> Path:
    from semel.lab.testing.models import build

    return build("qwen2-vl", folder)


def _result(tally: Tally) -> dict[str, Any]:
    for failure in tally.failures[:MAX_SHOWN]:
        sys.stderr.write(f"{failure[:400]}\n")
    return {
        "good": tally.good,
        "failed": len(tally.failures),
        "refused": tally.refused,
        "aborted": tally.aborted,
        "seconds": round(tally.seconds, 1),
        "requests_per_second": round(tally.per_second, 1),
    }


def _print(results: Mapping[str, Mapping[str, float]], *, as_json: bool) -> None:
    """One column for each result."""
    if as_json:
        (only, *more) = results.values()
        sys.stdout.write(f"{json.dumps(results if more else only)}\n")
        return
    table = Table("count", *results)
    for name in next(iter(results.values())):
        table.add_row(name.replace("_", " "), *(f"{result[name]:,}" for result in results.values()))
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
