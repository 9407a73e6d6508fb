"""Both levels of the simulator give the same figures, where both can run."""

from __future__ import annotations

from typing import Final

import pytest

from semel.lab.simulate.decisions import Decisions, Sizes
from semel.lab.simulate.figures import Figures, Times
from semel.lab.simulate.processes import FleetSize
from semel.lab.simulate.whole import Plan, run
from semel.lab.simulate.workload import Chats, Talks, Traffic

COUNTERS: Final = (
    "answered",
    "items",
    "encodes",
    "encoder_hits",
    "prefix_hits",
    "preprocessed",
    "features_sent",
    "feature_bytes",
)
CACHE_BYTES: Final = 1 << 30


def figures_of(runs: list[Figures]) -> dict[str, float]:
    """Sums of counters, and times over all runs."""
    found = {name: float(sum(getattr(one, name) for one in runs)) for name in COUNTERS}
    for name in ("first_token_s", "whole_s"):
        times = Times.of([second for one in runs for second in getattr(one, name)])
        found |= {f"{name} {part}": getattr(times, part) for part in ("mean", "p50", "p95")}
    return found


def differences(seeds: int, *, size: int, traffic: Traffic, side: int) -> dict[str, float]:
    """For each figure by how much the level of decisions differs from the whole code, as a share."""
    workload = Talks(Chats(size=(side, side)), traffic)
    whole = [run(Plan(workload, FleetSize(size, size, cache_bytes=CACHE_BYTES), seed=seed)) for seed in range(seeds)]
    sizes = Sizes(size, size, feature_cache_bytes=CACHE_BYTES)
    decided = [Decisions(sizes, workload, seed=seed).run() for seed in range(seeds)]
    expected, found = figures_of(whole), figures_of(decided)
    return {name: found[name] / expected[name] - 1 for name in expected}


@pytest.mark.slow
def test_both_levels_agree_on_a_small_fleet() -> None:
    found = differences(3, size=4, traffic=Traffic(8.0, 12.0, answer_tokens=16), side=448)
    assert {name: share for name, share in found.items() if abs(share) > 0.1} == {}
