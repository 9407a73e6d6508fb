"""Refusals: at once while they are few, and only so many a second once they are not (S18)."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from semel.frontend.middleware.refusal_rate import RefusalLimits, RefusalThrottle
from tests.frontend.asgi import Exchange, stream_of
from tests.frontend.rig import Rig

LIMITS = RefusalLimits(per_s=8.0, burst=16, max_wait_s=2.0)
MIB = 1024**2


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def test_a_burst_is_answered_at_once_and_what_follows_waits_for_its_turn() -> None:
    pace = RefusalThrottle(LIMITS, Clock())
    assert [pace.wait_s() for _ in range(16)] == [0.0] * 16
    assert [pace.wait_s() for _ in range(3)] == [0.125, 0.25, 0.375]


def test_nobody_waits_longer_than_the_limit_and_after_a_pause_nobody_waits() -> None:
    clock = Clock()
    pace = RefusalThrottle(LIMITS, clock)
    assert max(pace.wait_s() for _ in range(1_000)) <= LIMITS.max_wait_s
    clock.now += LIMITS.max_wait_s + LIMITS.burst / LIMITS.per_s
    assert [pace.wait_s() for _ in range(16)] == [0.0] * 16


def test_without_a_pace_nobody_waits() -> None:
    pace = RefusalThrottle(RefusalLimits(per_s=0), Clock())
    assert not any(pace.wait_s() for _ in range(1_000))


@given(st.integers(1, 60), st.integers(1, 400))
def test_clients_that_wait_for_their_answers_are_refused_no_faster_than_the_pace(clients: int, seconds: int) -> None:
    """Each sends its next request the moment it is answered; without a pace that is as fast as the processor goes."""
    clock = Clock()
    pace = RefusalThrottle(LIMITS, clock)
    due = [clock.now] * clients
    refused, end = 0, clock.now + seconds / 10
    while (at := min(due)) < end and refused < 5_000:
        clock.now = at
        due[due.index(at)] = at + pace.wait_s() + 1e-6
        refused += 1
    slowest = max(LIMITS.per_s, clients / LIMITS.max_wait_s)
    assert refused <= LIMITS.burst + slowest * seconds / 10 + clients + 1


async def test_a_refusal_that_waits_holds_nothing_of_its_request(app: Rig) -> None:
    app.service.refusals = RefusalLimits(per_s=1.0, burst=0, max_wait_s=0.5)
    gc.collect()
    tracemalloc.start()
    exchange = Exchange()
    sending = exchange.run(app.app, "/v1/chat/completions", stream_of(b" " * MIB for _ in range(8)))
    refused = asyncio.create_task(sending)
    while not app.metrics("semel_refusals_total"):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert not refused.done()
    assert held < MIB < peak
    assert app.service.budget.in_flight == 0
    await refused
    assert exchange.status == 400
