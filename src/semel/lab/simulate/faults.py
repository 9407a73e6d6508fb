"""Faults of a simulated fleet: at given times, or drawn from a seed.

Every fault ends: what was killed is started again, what was cut is healed. So a run can be held to its invariants.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final

__all__ = [
    "Blip",
    "Broken",
    "Crash",
    "Drain",
    "Fault",
    "FrontendCrash",
    "Join",
    "Partition",
    "Slow",
    "draw_faults",
]

_SHARE: Final = 0.5
"""Of the kinds of faults that a drawn run has."""


@dataclass(frozen=True, slots=True)
class Crash:
    """A worker is killed, and started again with empty caches."""

    at_s: float
    worker: int
    for_s: float


@dataclass(frozen=True, slots=True)
class FrontendCrash:
    """A frontend is killed with its requests, and started again."""

    at_s: float
    frontend: int
    for_s: float


@dataclass(frozen=True, slots=True)
class Drain:
    """A worker answers what it has, ends, and is started again: a rolling update."""

    at_s: float
    worker: int
    for_s: float


@dataclass(frozen=True, slots=True)
class Join:
    """One more worker is there, and frontends hear of it one after another."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Partition:
    """Nothing gets through between some frontends and a worker."""

    at_s: float
    frontends: tuple[int, ...]
    worker: int
    for_s: float


@dataclass(frozen=True, slots=True)
class Slow:
    """Everything takes a worker's engine so many times as long."""

    at_s: float
    worker: int
    for_s: float
    factor: float = 5.0


@dataclass(frozen=True, slots=True)
class Broken:
    """A worker's engine fails every request at once."""

    at_s: float
    worker: int
    for_s: float


@dataclass(frozen=True, slots=True)
class Blip:
    """All connections of a worker break, and may be opened again at once."""

    at_s: float
    worker: int


Fault = Crash | FrontendCrash | Drain | Join | Partition | Slow | Broken | Blip


def draw_faults(rng: Random, *, frontends: int, workers: int, seconds: float) -> tuple[Fault, ...]:
    """About half of the kinds, each once, at any time of a run."""

    def worker() -> int:
        return rng.randrange(workers)

    def at_s() -> float:
        return rng.uniform(0.1, 0.8) * seconds

    def for_s() -> float:
        return rng.uniform(0.1, 0.4) * seconds

    def some() -> tuple[int, ...]:
        return tuple(sorted(rng.sample(range(frontends), rng.randint(1, frontends))))

    kinds: list[Fault] = [
        Crash(at_s(), worker(), for_s()),
        FrontendCrash(at_s(), rng.randrange(frontends), for_s()),
        Drain(at_s(), worker(), for_s()),
        Join(at_s()),
        Partition(at_s(), some(), worker(), for_s()),
        Partition(at_s(), some(), worker(), 12.0),
        Slow(at_s(), worker(), for_s()),
        Broken(at_s(), worker(), for_s()),
        Blip(at_s(), worker()),
    ]
    return tuple(sorted((one for one in kinds if rng.random() < _SHARE), key=lambda one: one.at_s))
