"""Large fleets take no longer than round robin: a sample of what `python -m tools.fleet.trace_makespans` draws."""

from __future__ import annotations

import pytest

from semel.fleet.balance import Balance
from tools.fleet.trace_makespans import LARGE, MAX_RATIO, ratios


class Unbounded(Balance):
    """Never passes over a worker for being busy."""

    def _bounds(self, among: int) -> tuple[float, float]:  # noqa: ARG002
        return 1e9, 1e9


@pytest.mark.slow
def test_large_fleets_take_no_longer_than_round_robin() -> None:
    assert all(ratio <= MAX_RATIO for ratio in ratios(LARGE["short"], 6))
    assert any(ratio > MAX_RATIO for ratio in ratios(LARGE["short"], 6, balance=Unbounded))
