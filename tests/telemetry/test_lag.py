"""The lag of an event loop, as the loop itself sees it."""

from __future__ import annotations

import time

import pytest

from semel.telemetry import Meter
from semel.telemetry.lag import LoopLag
from semel.telemetry.metrics import LOOP_LAG_SECONDS
from semel.telemetry.scrape import Scrape
from tests.waiting import until

pytestmark = pytest.mark.alone


def over(meter: Meter, bound_s: float) -> float:
    """How many of the looks found the loop later than that."""
    buckets = Scrape.parse(meter.render().decode()).buckets(LOOP_LAG_SECONDS)
    return buckets.get(float("inf"), 0.0) - buckets.get(bound_s, 0.0)


async def test_a_loop_that_is_held_up_is_seen_to_be_late() -> None:
    meter = Meter()
    lag = LoopLag(meter)
    time.sleep(0.4)  # noqa: ASYNC251 whatever blocks: 0.35 s after the first look was due
    await until(lambda: over(meter, 0.25) == 1)
    lag.close()
