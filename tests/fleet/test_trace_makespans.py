"""Large fleets take no longer than round robin: a sample of what `python -m tools.fleet.trace_makespans` draws."""

from __future__ import annotations

from dataclasses import replace

import pytest

from semel.fleet.balance import Balance
from tests.fleet.trace import SHORT, balanced, draw, round_robin, simulate
from tools.fleet.trace_makespans import LARGE, MAX_RATIO, makespan, ratios, round_robin_makespan

SMALL = replace(SHORT, min_workers=11, max_workers=13, requests=(8, 12))


@pytest.mark.parametrize("seed", range(4))
def test_one_balance_for_each_frontend_chooses_as_one_for_each_request(seed: int) -> None:
    trace = draw(seed, SMALL)
    assert makespan(trace) == simulate(trace, balanced).makespan_s
    assert round_robin_makespan(trace) == simulate(trace, round_robin).makespan_s


class Unbounded(Balance):
    """Never passes over a worker for being busy."""

    def _bounds(self, among: int) -> tuple[float, float]:  # noqa: ARG002
        return 1e9, 1e9


@pytest.mark.slow
def test_large_fleets_take_no_longer_than_round_robin() -> None:
    assert all(ratio <= MAX_RATIO for ratio in ratios(LARGE["short"], 6))
    assert any(ratio > MAX_RATIO for ratio in ratios(LARGE["short"], 6, balance=Unbounded))
