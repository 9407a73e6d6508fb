"""A simulated run next to a measured one of the same requests (`--against`).

A recorded run has the requests in order, with the frontend that each went to, how many were asked at a time, and what
was measured. It is simulated round by round, with empty caches each time, as it was run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Final, Literal

import msgspec
from rich.console import Console
from rich.table import Table

from semel.errors import ConfigError
from semel.lab.simulate.costs import Costs
from semel.lab.simulate.engine import EngineLimits
from semel.lab.simulate.figures import Figures, Times
from semel.lab.simulate.processes import FleetSize
from semel.lab.simulate.whole import Plan, run
from semel.lab.simulate.workload import Ask, Item

__all__ = [
    "Comparison",
    "RecordedImage",
    "RecordedRun",
    "compare",
    "fit",
    "measures",
    "plans",
    "predict",
    "print_comparison",
    "read_run",
]

_COUNTERS: Final = ("encodes", "encoder_hits", "preprocessed", "features_sent", "feature_bytes")
_COUNTER_SHARE: Final = 0.10
_TIMES: Final = {"p50_s": 0.10, "p95_s": 0.20}
_FITS: Final = 3


class RecordedImage(msgspec.Struct, frozen=True):
    """All images of a recorded run are alike."""

    width: int
    height: int
    tokens: int
    nbytes: int
    """Of its features."""


class RecordedRun(msgspec.Struct, frozen=True):
    """The output of `scripts/load --compare --record`."""

    frontends: int
    workers: int
    clients: int
    """Requests at a time."""

    answer_tokens: int
    prompt_tokens: int
    """With its image."""

    image: RecordedImage
    rounds: list[list[tuple[int, int]]]
    """For each round its requests: the number of the image, and of the frontend."""

    measured: dict[str, float]
    engines: Literal["real", "modelled"] = "real"
    """The times of real engines depend on the machine: only those of modelled ones are judged."""

    block_tokens: int = 128
    """Of the engines' prefix caches."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure, measured and simulated."""

    name: str
    measured: float
    simulated: float
    limit: float | None
    """The share by which it may differ; None if it is not judged."""

    @property
    def difference(self) -> float:
        """As a share of what was measured."""
        return (self.simulated - self.measured) / self.measured if self.measured else float(bool(self.simulated))

    @property
    def is_within(self) -> bool:
        """Return whether it differs by no more than it may."""
        return self.limit is None or abs(self.difference) <= self.limit


@dataclass(frozen=True)
class _Round:
    """The requests of one round, as a workload."""

    run: RecordedRun
    requests: Sequence[tuple[int, int]]

    def asks(self, rng: Random) -> Iterator[Ask]:  # noqa: ARG002
        """In order, all at once: clients take them one after another."""
        one, image = self.run, self.run.image
        for number, _ in self.requests:
            item = Item(number, image.width, image.height, image.tokens, image.nbytes)
            yield Ask(0.0, "", number, (item,), one.prompt_tokens, one.answer_tokens)


def read_run(path: Path) -> RecordedRun:
    """Return a recorded run; a `ConfigError` if the file is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=RecordedRun)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} is no run that `scripts/load --compare --record` has written: {error}") from error


def plans(recorded: RecordedRun, costs: Costs, seed: int = 0) -> list[Plan]:
    """Return what to simulate: a plan for each round."""
    limits = EngineLimits(block_tokens=recorded.block_tokens)
    size = FleetSize(recorded.frontends, recorded.workers, engine=limits)
    return [
        Plan(
            _Round(recorded, requests),
            size,
            costs,
            seed=seed + number,
            clients=recorded.clients,
            frontends=[frontend for _, frontend in requests],
        )
        for number, requests in enumerate(recorded.rounds)
    ]


def measures(rounds: Sequence[Figures]) -> dict[str, float]:
    """Return the figures of all rounds under the names of a recorded run."""
    times = Times.of([second for figures in rounds for second in figures.whole_s])
    counters = {name: float(sum(getattr(figures, name) for figures in rounds)) for name in _COUNTERS}
    return counters | {"p50_s": times.p50, "p95_s": times.p95}


def predict(recorded: RecordedRun, costs: Costs, seed: int = 0) -> dict[str, float]:
    """Simulate a recorded run."""
    return measures([run(plan) for plan in plans(recorded, costs, seed)])


def fit(recorded: RecordedRun, costs: Costs, seed: int = 0) -> Costs:
    """Return the same costs with what each step takes besides, so that the median of a recorded run is met.

    That is code which takes no time under a virtual clock. Fit it on one run, and use it for others.
    """
    for _ in range(_FITS):
        missing = recorded.measured["p50_s"] - predict(recorded, costs, seed)["p50_s"]
        costs = replace(costs, step_base_s=max(0.0, costs.step_base_s + missing / (recorded.answer_tokens + 1)))
    return costs


def compare(recorded: RecordedRun, simulated: dict[str, float]) -> list[Comparison]:
    """Return every figure of a recorded run next to the simulated one."""
    limits: dict[str, float | None] = dict.fromkeys(_COUNTERS, _COUNTER_SHARE)
    limits |= _TIMES if recorded.engines == "modelled" else dict.fromkeys(_TIMES)
    return [
        Comparison(name, recorded.measured[name], simulated[name], limit)
        for name, limit in limits.items()
        if name in recorded.measured
    ]


def print_comparison(console: Console, found: Sequence[Comparison]) -> bool:
    """Print a table; whether everything is within its limit."""
    table = Table("", "measured", "simulated", "difference", "limit")
    for one in found:
        limit = "" if one.limit is None else f"{one.limit:.0%}"
        verdict = "" if one.is_within else " (!)"
        table.add_row(
            one.name, f"{one.measured:,.4g}", f"{one.simulated:,.4g}", f"{one.difference:+.1%}{verdict}", limit
        )
    console.print(table)
    return all(one.is_within for one in found)
