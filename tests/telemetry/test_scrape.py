"""Reading metrics back."""

from __future__ import annotations

from bisect import bisect_left

from hypothesis import given
from hypothesis import strategies as st

from semel.telemetry import Meter, Metric
from semel.telemetry.scrape import Scrape, quantile

VISITS = Metric("semel_visits_total", "Visits.", ("door", "day"))
STAY = Metric("semel_stay_seconds", "Stay.", ("door",), (0.1, 1.0, 10.0))
BOUNDS = (*STAY.buckets, float("inf"))


def stays(values: list[float]) -> dict[float, float]:
    meter = Meter()
    for value in values:
        meter.observe(STAY, value, "front")
    return Scrape.parse(meter.render().decode()).buckets(STAY, door="front")


def test_what_was_counted_is_read_back_by_any_of_its_labels() -> None:
    meter = Meter()
    meter.count(VISITS, "front", "Monday", amount=2)
    meter.count(VISITS, "front", "Tuesday")
    meter.count(VISITS, "back", "Monday")
    scrape = Scrape.parse(meter.render().decode())
    assert scrape.total(VISITS) == 4
    assert scrape.total(VISITS, door="front") == 3
    assert scrape.values(VISITS, "day") == {"Monday": 3, "Tuesday": 1}


@given(st.lists(st.floats(0.0, 9.0), max_size=30), st.lists(st.floats(0.0, 9.0), max_size=30), st.floats(0.01, 0.99))
def test_a_quantile_lies_in_the_bucket_of_the_value_with_that_rank(
    before: list[float], since: list[float], q: float
) -> None:
    found = quantile(q, stays(before), stays(before + since))
    if not since:
        assert found is None
        return
    assert found is not None
    ranked = sorted(since)
    exact = ranked[min(len(ranked) - 1, max(0, -(-q * len(ranked) // 1).__int__() - 1))]
    bucket = bisect_left(BOUNDS, exact)
    low = 0.0 if bucket == 0 else BOUNDS[bucket - 1]
    assert low <= found <= BOUNDS[bucket]


def test_past_the_last_bound_a_quantile_is_that_bound() -> None:
    assert quantile(0.5, {}, stays([50.0, 60.0])) == 10.0
