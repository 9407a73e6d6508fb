"""tcp next to ipc, measured in turns: `scripts/load --transports`.

Two workers, one over ipc and one over tcp, with real engines or without models (`--without-engines`), and three
frontends: one hands features to the first worker in shared memory, one sends them to it in frames, one sends them to
the other over tcp, encrypted. Only one of them is asked at a time; who begins changes from round to round.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

import numpy as np

from semel.lab.bench.serving.procfs import cpu_s
from semel.lab.prove.counters import settled
from semel.lab.prove.processes import Fleet, Node
from tests.engine.parity import draw_image
from tools.fleet.comparing import ROOMY_GB
from tools.fleet.driving import exchange
from tools.fleet.plan import Ask, body_of

__all__ = ["Figures", "Path", "begin_paths", "measure"]

SIDE: Final = 448
AT_A_TIME: Final = 4
TOKENS: Final = 1


@dataclass(frozen=True, slots=True)
class Path:
    """A frontend and the worker that it sends to."""

    frontend: Node
    worker: Node


@dataclass(slots=True)
class Figures:
    """The result of a path, a value for each round; latencies for each request."""

    repeats_s: list[float] = field(default_factory=list)
    new_s: list[float] = field(default_factory=list)
    """A round of new images, from the first to the last."""

    new: int = 0
    """Images of a round."""

    nbytes: list[int] = field(default_factory=list)
    """Of features, in a round of new images."""

    frontend_s: list[float] = field(default_factory=list)
    worker_s: list[float] = field(default_factory=list)
    """CPU time in a round of new images; of the worker without its engine's processes."""

    failed: int = 0

    def table(self) -> dict[str, float]:
        """Return the figures by their names: medians, so that a busy moment of the machine counts for little."""
        return {
            "latency of a repeat, ms": round(1e3 * median(self.repeats_s), 1),
            "new features per second": round(self.new / median(self.new_s), 1),
            "bytes of a new feature, KB": round(median(self.nbytes) / self.new / 1e3, 1),
            "processor, frontend, ms a new feature": round(1e3 * median(self.frontend_s) / self.new, 1),
            "processor, worker, ms a new feature": round(1e3 * median(self.worker_s) / self.new, 1),
            "requests": len(self.repeats_s) + self.new * len(self.new_s),
            "failed": self.failed,
        }


def begin_paths(fleet: Fleet, *, has_engines: bool) -> Mapping[str, Path]:
    """Start the workers and frontends of an empty fleet."""
    for transport in ("ipc", "tcp"):
        fleet.transport = transport
        if has_engines:
            fleet.begin_worker(cache_gb=ROOMY_GB)
        else:
            fleet.begin_modelless_worker()
    over_ipc, over_tcp = fleet.workers
    fleet.until_up()
    frontends = (
        fleet.begin_frontend([over_ipc.address]),
        fleet.begin_frontend([over_ipc.address], cache="lru"),
        fleet.begin_frontend([over_tcp.address]),
    )
    fleet.until_up()
    workers = (over_ipc, over_ipc, over_tcp)
    names = ("ipc, shared memory", "ipc, frames", "tcp")
    return {name: Path(*pair) for name, pair in zip(names, zip(frontends, workers, strict=True), strict=True)}


async def measure(paths: Mapping[str, Path], *, rounds: int, new: int, repeats: int, seed: int) -> dict[str, Figures]:
    """So many rounds, the first of them not counted: what is used for the first time is loaded then."""
    found = {name: Figures(new=new) for name in paths}
    for number in range(rounds + 1):
        names = list(paths)[:: 1 if number % 2 == 0 else -1]
        for name in names:
            rng = np.random.default_rng([seed, number, list(paths).index(name)])
            figures = found[name] if number else Figures(new=new)
            await _new(paths[name], [draw_image(rng, side=SIDE) for _ in range(new)], figures)
        for name in names:
            rng = np.random.default_rng([seed, number, list(paths).index(name)])
            figures = found[name] if number else Figures(new=new)
            await _repeat(paths[name], draw_image(rng, side=SIDE), repeats, figures)
    return found


async def _new(path: Path, images: Sequence[bytes], figures: Figures) -> None:
    nodes = [path.frontend], [path.worker]
    before = await asyncio.to_thread(settled, *nodes)
    frontend, worker = cpu_s(path.frontend.family()), cpu_s([path.worker.process.pid])
    room, began = asyncio.Semaphore(AT_A_TIME), time.monotonic()

    async def ask(image: bytes) -> None:
        async with room:
            figures.failed += not await _is_answered(path, image)

    await asyncio.gather(*map(ask, images))
    figures.new_s.append(time.monotonic() - began)
    figures.frontend_s.append(cpu_s(path.frontend.family()) - frontend)
    figures.worker_s.append(cpu_s([path.worker.process.pid]) - worker)
    counts = await asyncio.to_thread(settled, *nodes) - before
    figures.nbytes.append(counts.frames_bytes + counts.memory_bytes)


async def _repeat(path: Path, image: bytes, repeats: int, figures: Figures) -> None:
    """The same image again, one request at a time."""
    for _ in range(repeats):
        began = time.monotonic()
        figures.failed += not await _is_answered(path, image)
        figures.repeats_s.append(time.monotonic() - began)


async def _is_answered(path: Path, image: bytes) -> bool:
    status, _ = await exchange(path.frontend.url, body_of(Ask((0,), 0, tokens=TOKENS), [image]))
    return status == 200
