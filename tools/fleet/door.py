"""vLLM's own server with semel inside it, asked on both of its routes: `python -m tools.fleet.door --requests 1000`.

A frontend has the server as its worker. Chats go to the server itself and to the frontend at once, a quarter of them is
aborted, and the server's item cache has room for a tenth of the images. None may fail or have other tokens than alone,
and nothing that the worker announced may be lost; SIGTERM has to let streams of both routes end; and when a server is
killed under a frontend that has another worker, only streams that had begun may be cut off. Exit code 1 if one of these
is not so. Resubmissions and misses of the engine core are printed: clients do not see them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from semel.lab.prove.counters import until_idle
from semel.lab.prove.processes import FEATURE_BYTES, Fleet, Node, running_fleet
from semel.lab.testing.models import build
from semel.telemetry import metrics
from tests.serve.served import sum_of
from tools.fleet.driving import Driver, Tally, ask_alone, exchange, exchange_stream, token_ids
from tools.fleet.plan import Ask, Kind, Load, body_of, draw_images, plan

__all__ = ["ask_both", "cache_gb", "drain", "has_failed", "kill", "lost_announcements", "main"]

STREAMS: Final = 4
"""Long answers on each route while the server gets SIGTERM."""

LONG_TOKENS: Final = 400
MAX_SHOWN: Final = 20


def cache_gb(images: int) -> float:
    """Return the size of an item cache with room for a tenth of the images."""
    return (images / 10 + 0.5) * FEATURE_BYTES / 2**30


async def ask_both(urls: Sequence[str], load: Load, *, progress: bool = False) -> Tally:
    """Ask every chat alone, then all that is planned, at these addresses in no order; only tokens are compared.

    semel's features are bytes that the engine normalises, vLLM's are normalised: log probabilities are nearly equal.
    """
    images = draw_images(load.images)
    reference = await ask_alone(urls, load.chats(), images, compared=token_ids)
    driver = Driver(urls, images, reference, at_a_time=load.at_a_time, compared=token_ids)
    return await driver.run(plan(load, len(urls)), progress=progress)


async def lost_announcements(frontend: Node, images: Sequence[bytes]) -> int:
    """Ask for each image twice, one at a time; return how often the frontend was wrong about its only worker.

    It was if the worker had to ask for an item (its eviction was not announced), or got it a second time.
    """
    await until_idle([frontend])
    wrong = 0
    for number in range(len(images)):
        for is_repeat in (False, True):
            repaired, sent = _repaired_and_sent(frontend)
            status, answer = await exchange(frontend.url, body_of(Ask((number,), 0), images))
            assert status == 200, answer
            now_repaired, now_sent = _repaired_and_sent(frontend)
            wrong += now_repaired > repaired or (is_repeat and now_sent > sent)
    return wrong


async def drain(door: Node, frontend: Node, images: Sequence[bytes]) -> tuple[int, int | None]:
    """Send SIGTERM while long answers are streamed on both routes; return how many were whole, and the exit code."""
    body = body_of(Ask((0,), 0, Kind.STREAMED, tokens=LONG_TOKENS), images)
    fields = json.dumps(json.loads(body) | {"ignore_eos": True}).encode()
    streams = [asyncio.create_task(exchange_stream(url, fields)) for url in (door.url, frontend.url) * STREAMS]
    while sum_of(await asyncio.to_thread(door.metrics), "vllm:num_requests_running") < len(streams):
        await asyncio.sleep(0.05)
        assert not any(stream.done() for stream in streams), "an answer has ended before all of them ran"
    door.process.send_signal(signal.SIGTERM)
    answers = await asyncio.gather(*streams)
    await asyncio.to_thread(door.process.wait, 60)
    return sum(len(given[0]) == LONG_TOKENS and error is None for given, error in answers), door.process.returncode


async def kill(fleet: Fleet, door: Node, frontend: Node, load: Load) -> Tally:
    """Kill a server in the middle of a load on a frontend that has another worker."""
    images = draw_images(load.images)
    reference = await ask_alone([frontend.url], load.chats(), images, compared=token_ids)
    driver = Driver([frontend.url], images, reference, at_a_time=load.at_a_time, compared=token_ids)
    running = asyncio.create_task(driver.run(plan(load, 1)))
    await driver.until_answered(load.requests // 3)
    driver.killed_workers += 1
    for pid in await asyncio.to_thread(door.kill):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    fleet.workers.remove(door)
    return await running


def main(words: list[str] | None = None) -> int:
    """Run all of it, and print what came of it."""
    options = _parser().parse_args(words)
    load = Load(options.requests, images=options.images, aborted=0.25, refused=options.refused, seed=options.seed)
    images = draw_images(load.images)
    with tempfile.TemporaryDirectory(prefix="semel-model-") as folder:
        model = build("qwen2-vl", Path(folder) / "qwen2-vl")
        with running_fleet(model, workers=0, frontends=0) as fleet:
            door = fleet.begin_door(cache_gb=cache_gb(load.images))
            fleet.until_up()
            frontend = fleet.begin_frontend([door.address])
            fleet.until_up()
            tally = asyncio.run(ask_both([door.url, frontend.url], load, progress=True))
            found: dict[str, Any] = _result(tally, {"vllm": door.url, "frontend": frontend.url})
            found["lost_announcements"] = asyncio.run(lost_announcements(frontend, images))
            found["resubmissions"] = door.log.read_text().count("the engine had lost")
            found["misses"] = door.log.read_text().count("Multi-modal cache miss")
            found["drained"], found["exit_code"] = asyncio.run(drain(door, frontend, images))
        if not options.without_kill:
            with running_fleet(model, workers=1, frontends=0) as fleet:
                door = fleet.begin_door(cache_gb=cache_gb(load.images))
                fleet.until_up()
                frontend = fleet.begin_frontend(fleet.addresses)
                fleet.until_up()
                killed = asyncio.run(kill(fleet, door, frontend, replace(load, requests=load.requests // 4)))
                found |= {"killed_failed": len(killed.failures), "killed_cut_off": len(killed.lost)}
                _show(killed)
    sys.stdout.write(f"{json.dumps(found)}\n")
    return int(has_failed(found))


def has_failed(found: Mapping[str, Any]) -> bool:
    """Return whether a run shows a fault, or no good answer at all."""
    faults = [found[name] for name in ("failures", "different", "lost_announcements", "exit_code")]
    return not found["good"] or found["drained"] != 2 * STREAMS or any((*faults, found.get("killed_failed")))


def _repaired_and_sent(frontend: Node) -> tuple[float, float]:
    text = frontend.metrics()
    return sum_of(text, metrics.FEATURES_REPAIRED.name), sum_of(text, metrics.FEATURES_SENT.name)


def _result(tally: Tally, routes: dict[str, str]) -> dict[str, Any]:
    _show(tally)
    failed = {f"failed_{name}": sum(f"{url}:" in one for one in tally.failures) for name, url in routes.items()}
    different = sum(": answered " in one for one in tally.failures)
    counts = {"good": tally.good, "refused": tally.refused, "aborted": tally.aborted}
    return {**counts, "failures": len(tally.failures), "different": different, **failed}


def _show(tally: Tally) -> None:
    for failure in tally.failures[:MAX_SHOWN]:
        sys.stderr.write(f"{failure[:400]}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("scripts/door-load", description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000)
    parser.add_argument("--images", type=int, default=120)
    parser.add_argument("--refused", type=float, default=0.0, help="the share of requests that the engine refuses")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without-kill", action="store_true", help="leave out the server that is killed")
    return parser


if __name__ == "__main__":
    sys.exit(main())
