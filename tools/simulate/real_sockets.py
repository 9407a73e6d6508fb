"""The same parts as in a simulation, with modelled engines, over real sockets and by the real clock.

`python -m tools.simulate.real_sockets --fit 40 --seed 41` prints one next to the other, with costs fitted on another
seed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Final

from rich.console import Console

from semel.lab.simulate.check import (
    RecordedImage,
    RecordedRun,
    compare,
    fit,
    measures,
    plans,
    predict,
    print_comparison,
)
from semel.lab.simulate.costs import MODELLED, Costs
from semel.lab.simulate.figures import Figures
from semel.lab.simulate.processes import Host
from semel.lab.simulate.whole import Plan, World

COSTS: Final = replace(MODELLED, latency_s=0.1e-3)
IMAGE: Final = RecordedImage(448, 448, 256, 150_000)


def recorded(seed: int, requests: int = 240, repeats: float = 0.8) -> RecordedRun:
    """Requests as `scripts/load --compare` asks them: one image each, most of which came before."""
    rng = Random(seed)
    seen, asked = 0, []
    for _ in range(requests):
        is_new = not seen or rng.random() >= repeats
        asked.append((seen if is_new else int(seen * rng.random() ** 2), rng.randrange(2)))
        seen += is_new
    return RecordedRun(2, 3, 8, 16, 300, IMAGE, [asked], {}, engines="modelled")


async def _run(plan: Plan, folder: Path) -> Figures:
    world = World(plan, Host(plan.size, plan.costs, plan.seed, folder=f"ipc://{folder}/"))
    await world.start()
    try:
        await world.play()
        return world.collect()
    finally:
        await world.close()


def measure(run: RecordedRun, costs: Costs = COSTS) -> RecordedRun:
    """Run it for real; the same with what was measured."""
    rounds = []
    for plan in plans(run, costs):
        with tempfile.TemporaryDirectory(prefix="semel-simulate-") as folder:
            rounds.append(asyncio.run(_run(plan, Path(folder))))
    return RecordedRun(
        run.frontends,
        run.workers,
        run.clients,
        run.answer_tokens,
        run.prompt_tokens,
        run.image,
        run.rounds,
        measures(rounds),
        engines="modelled",
    )


def main() -> int:
    """Fit on one seed, compare on another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", type=int, default=40)
    parser.add_argument("--seed", type=int, default=41)
    parser.add_argument("--requests", type=int, default=240)
    options = parser.parse_args()
    costs = fit(measure(recorded(options.fit, options.requests)), COSTS)
    measured = measure(recorded(options.seed, options.requests))
    return int(not print_comparison(Console(), compare(measured, predict(measured, costs))))


if __name__ == "__main__":
    sys.exit(main())
