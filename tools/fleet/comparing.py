"""semel's choice of workers and round robin's, in turns, on the same engines: the same requests, with empty caches.

Caches are so large that nothing is evicted: an item that is encoded twice was asked of two workers.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median, quantiles
from typing import Final, Self

from semel.lab.prove.counters import Counts, settled
from semel.lab.prove.processes import Fleet, Node
from semel.lab.simulate.repeats import CAUSES, Cause, Preprocessing, causes_of
from semel.telemetry import metrics
from tests.serve.served import sum_of, until
from tools.fleet.driving import Driver, Reference, Tally, ask_alone
from tools.fleet.noting import notes_of, noting
from tools.fleet.plan import Repeats, draw_images, plan_repeats

__all__ = ["ROOMY_GB", "Figures", "Frontends", "begin_noting", "begin_rivals", "compare", "empty", "noted"]

ROOMY_GB: Final = 0.25
"""For an engine's item cache: thousands of the loads' images."""

EMPTY_S: Final = 30.0
FRONTENDS: Final = 2
_NOTES: Final = ".notes"

Frontends = Mapping[str, Sequence[Node]]
"""By how they choose."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The result of a load, over all its rounds."""

    tallies: Sequence[Tally]
    counts: Sequence[Counts]
    images: int
    """Different ones in a round."""

    again: Counter[Cause] = field(default_factory=Counter)
    """Preprocessings of images that had been preprocessed before, by cause."""

    @property
    def failures(self) -> list[str]:
        return [failure for tally in self.tallies for failure in (*tally.failures, *tally.lost)]

    @property
    def encodes_per_image(self) -> float:
        return self._total("encoded") / (self.images * len(self.counts))

    @property
    def evictions(self) -> int:
        return self._total("encoder_evictions") + self._total("worker_evictions") + self._total("processor_evictions")

    @property
    def latencies_s(self) -> list[float]:
        return [latency for tally in self.tallies for latency in tally.latencies_s]

    def table(self) -> dict[str, float]:
        """Return the figures by their names."""
        percentiles = quantiles(self.latencies_s, n=20)
        return {
            "encodes per image": round(self.encodes_per_image, 3),
            "encoder hit rate": self._rate("encoder"),
            "worker tier hit rate": self._rate("worker"),
            "processor tier hit rate": self._rate("processor"),
            "processed per image": round(self._total("processed") / (self.images * len(self.counts)), 3),
            **{f"again: {cause}": round(self.again[cause] / (self.images * len(self.counts)), 3) for cause in CAUSES},
            "megabytes sent": round((self._total("frames_bytes") + self._total("memory_bytes")) / 1e6, 1),
            "latency p50, ms": round(1e3 * median(self.latencies_s), 1),
            "latency p95, ms": round(1e3 * percentiles[-1], 1),
            "makespan, s": round(median(tally.seconds for tally in self.tallies), 2),
            "evictions": self.evictions,
            "failed": len(self.failures),
        }

    def measured(self) -> dict[str, float]:
        """Return the figures that a simulation of the same load is held against (`semel simulate --against`)."""
        percentiles = quantiles(self.latencies_s, n=20)
        return {
            "encodes": self._total("encoded"),
            "encoder_hits": self._total("encoder_hits"),
            "preprocessed": self._total("processed"),
            "features_sent": self._total("sent"),
            "feature_bytes": self._total("frames_bytes") + self._total("memory_bytes"),
            "p50_s": median(self.latencies_s),
            "p95_s": percentiles[-1],
        }

    def _total(self, name: str) -> int:
        return sum(getattr(one, name) for one in self.counts)

    def _rate(self, tier: str) -> float:
        return round(self._total(f"{tier}_hits") / max(1, self._total(f"{tier}_queries")), 3)

    def __add__(self, other: Self) -> Self:
        tallies, counts = [*self.tallies, *other.tallies], [*self.counts, *other.counts]
        return replace(self, tallies=tallies, counts=counts, again=self.again + other.again)


def begin_rivals(fleet: Fleet, count: int = FRONTENDS) -> Frontends:
    """Frontends that choose as semel does and others that ask one worker after another, all of the same workers."""
    found = {
        "semel": [begin_noting(fleet, "semel") for _ in range(count)],
        "round robin": [begin_noting(fleet, "round_robin") for _ in range(count)],
    }
    fleet.until_up()
    return found


def begin_noting(fleet: Fleet, choice: str) -> Node:
    """Start a frontend that chooses workers so and notes its preprocessings (`noted`)."""
    notes = fleet.home / f"frontend-{len(fleet.frontends)}{_NOTES}"
    return fleet.begin_frontend(fleet.addresses, semel=noting(notes, choice))


async def compare(fleet: Fleet, frontends: Frontends, load: Repeats, *, rounds: int = 1) -> dict[str, Figures]:
    """Rounds of a load, each time through one kind of frontends after the other; every round has other images."""
    found: dict[str, Figures] = {}
    for number in range(rounds):
        images = draw_images(load.images, seed=load.seed + number)
        urls = [node.url for node in frontends["semel"]]
        reference = await ask_alone(urls, load.chats(), images, tokens=load.tokens)
        for name in list(frontends)[:: 1 if number % 2 == 0 else -1]:
            figures = await _drive(fleet, frontends[name], replace(load, seed=load.seed + number), images, reference)
            found[name] = found[name] + figures if name in found else figures
    return found


async def _drive(
    fleet: Fleet, frontends: Sequence[Node], load: Repeats, images: Sequence[bytes], reference: Reference
) -> Figures:
    await asyncio.to_thread(empty, fleet)
    before = await asyncio.to_thread(settled, frontends, fleet.running_workers)
    began = time.monotonic()
    driver = Driver([node.url for node in frontends], images, reference, at_a_time=load.at_a_time)
    tally = await driver.run(plan_repeats(load, len(frontends)))
    after = await asyncio.to_thread(settled, frontends, fleet.running_workers)
    return Figures([tally], [after - before], load.images, causes_of(noted(frontends, began)))


def noted(frontends: Sequence[Node], since: float) -> list[Preprocessing]:
    """Return all preprocessings of frontends from a time on: those before are warm-up."""
    return [one for node in frontends for one in notes_of(node.log.with_suffix(_NOTES)) if one.began >= since]


def empty(fleet: Fleet) -> None:
    """Reset all caches of a fleet, and wait until every one is empty."""
    fleet.reset()
    for node in fleet.running:
        until(lambda node=node: sum_of(node.metrics(), metrics.MM_CACHE_ITEMS.name) == 0, EMPTY_S)  # type: ignore[misc]
