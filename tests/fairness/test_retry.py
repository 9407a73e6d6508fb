"""When those who were refused should come again: as fast as places become free, each tenant by itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from semel.fairness.retry import RetryQueue


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def busy(clock: Clock, *, per_s: float, tenant: str = "a") -> RetryQueue:
    """A queue of which is known how fast places become free."""
    queue = RetryQueue(clock)
    queue.after_s(tenant)
    for _ in range(200):
        clock.now += 1 / per_s
        queue.free()
    return queue


def test_the_first_is_told_to_come_in_a_moment_however_long_nothing_had_happened() -> None:
    clock = Clock()
    queue = busy(clock, per_s=10)
    clock.now += 3_600
    assert queue.after_s("a") == 1.0


def test_it_grows_with_the_queue_and_with_how_slowly_it_moves() -> None:
    """Control: the constant 1 that everybody was told, so that all came back together."""
    fast, slow = busy(Clock(), per_s=100), busy(Clock(), per_s=10)
    told = [[queue.after_s("a") for _ in range(200)] for queue in (fast, slow)]
    assert all(one == sorted(one) for one in told)
    assert (told[0][0], round(told[0][-1], 1)) == (1.0, 2.0), "200 behind each other, 100 of them a second"
    assert round(told[1][-1]) == 20


def test_a_tenant_that_is_refused_often_makes_no_other_wait() -> None:
    queue = busy(Clock(), per_s=10)
    flood = [queue.after_s("flood") for _ in range(10_000)]
    assert flood[-1] == 30.0
    assert queue.after_s("other") == 1.0


@given(st.lists(st.tuples(st.sampled_from(["refuse", "free", "wait"]), st.floats(0, 100)), max_size=60))
def test_nobody_is_told_less_than_a_second_or_more_than_30(steps: list[tuple[str, float]]) -> None:
    clock = Clock()
    queue = RetryQueue(clock)
    for what, seconds in steps:
        if what == "wait":
            clock.now += seconds
        elif what == "free":
            queue.free()
        else:
            assert 1.0 <= queue.after_s("a") <= 30.0
