"""The trace, the policies and the bound."""

from __future__ import annotations

import pytest

from semel.encoder.eviction import CostAware, OldestReleased
from semel.lab.bench.eviction import Trace, bound, encode_cost


def test_a_trace_is_the_same_for_the_same_seed() -> None:
    assert Trace.draw(1, 100) == Trace.draw(1, 100)
    assert Trace.draw(1, 100) != Trace.draw(2, 100)


@pytest.mark.parametrize("seed", range(3))
def test_no_policy_goes_below_the_bound_and_cost_aware_pays_less_than_oldest_released(seed: int) -> None:
    trace = Trace.draw(seed, 5_000)
    compulsory = sum(trace.costs[item] for item in set(trace.shows))
    assert compulsory < bound(trace) < encode_cost(trace, CostAware()) < encode_cost(trace, OldestReleased())


def test_the_bound_is_exact_where_everything_fits() -> None:
    trace = Trace(sizes=[1] * 20, costs=[3.0] * 20, shows=[0, 1, 0, 1, 0])
    assert trace.capacity == 2
    assert bound(trace) == encode_cost(trace, OldestReleased()) == 6.0
