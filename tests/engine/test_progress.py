"""When an engine counts as hung, against a slow model that looks at every moment."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.engine.progress import FIRST_S, FIRST_STEPS, AwakeClock, StepWatch

Event = Literal["begin", "end", "step", "suspend", "resume", "wait"]


@dataclass
class Moments:
    """The model: every second of the past, with what was so in it."""

    seconds: list[bool] = field(default_factory=list)
    """Of each second, whether a request was under way and nothing suspended the clock."""

    marks: list[int] = field(default_factory=list)
    """How many seconds there were at each step."""

    requests: int = 0
    suspensions: int = 0

    def pass_time(self, seconds: int) -> None:
        self.seconds += [self.requests > 0 and self.suspensions == 0] * seconds

    def waited(self) -> int:
        return sum(self.seconds[self.marks[-1] if self.marks else 0 :])

    def longest(self) -> int:
        bounds = [0, *self.marks]
        return max((sum(self.seconds[a:b]) for a, b in pairwise(bounds)), default=0)

    def is_hung(self, progress_s: int) -> bool:
        first = FIRST_S if len(self.marks) < FIRST_STEPS else 0
        return progress_s > 0 and self.waited() >= max(progress_s, 4 * self.longest(), first)


def play(events: list[tuple[Event, int]], watch_kind: type[StepWatch] = StepWatch) -> list[tuple[bool, bool]]:
    """What watch and model say after every event, for a limit of 0 and one of 20 s."""
    now = 0.0
    watch, model = watch_kind(AwakeClock(lambda: now, max_gap_s=inf)), Moments()
    verdicts = []
    for kind, seconds in events:
        match kind:
            case "begin":
                model.requests += 1
                watch.set_requests(model.requests)
            case "end" if model.requests:
                model.requests -= 1
                watch.set_requests(model.requests)
            case "suspend":
                watch.suspend()
                model.suspensions += 1
            case "resume" if model.suspensions:
                watch.resume()
                model.suspensions -= 1
            case "step":
                watch.step()
                model.marks.append(len(model.seconds))
            case "wait":
                now += seconds
                model.pass_time(seconds)
            case _:
                pass
        assert watch.steps == len(model.marks)
        verdicts += [(watch.is_hung(limit), model.is_hung(limit)) for limit in (0, 20)]
    return verdicts


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["begin", "end", "step", "step", "suspend", "resume"]), st.just(0)),
        st.tuples(st.just("wait"), st.sampled_from([0, 1, 5, 19, 20, 21, 80, 600])),
    ),
    max_size=60,
)


@given(EVENTS)
def test_it_agrees_with_a_model_that_looks_at_every_second(events: list[tuple[Event, int]]) -> None:
    assert all(ours == theirs for ours, theirs in play(events))


class Forgetful(StepWatch):
    """Begins anew with each request, as one would write it first."""

    def set_requests(self, requests: int) -> None:
        if requests > self._requests:
            self._waited_s, self._since = 0.0, self.clock()
        super().set_requests(requests)


RETRIES: list[tuple[Event, int]] = [("begin", 0), *[("step", 0)] * 10, *[("wait", 15), ("end", 0), ("begin", 0)] * 2]  # type: ignore[list-item]


def test_clients_that_give_up_and_send_again_do_not_hide_a_hung_engine() -> None:
    """Control: a clock that begins anew with each request, which the model above tells apart as well."""
    assert play(RETRIES)[-1] == (True, True)
    assert play(RETRIES, Forgetful)[-1] == (False, True)


def watched(steps: int, *, longest_s: float = 0.0) -> tuple[StepWatch, list[float]]:
    now = [0.0]
    watch = StepWatch(AwakeClock(lambda: now[0], max_gap_s=inf))
    watch.set_requests(1)
    for number in range(steps):
        now[0] += 0.0 if number else longest_s
        watch.step()
    return watch, now


@pytest.mark.parametrize(
    ("steps", "longest_s", "waits_s", "is_hung"),
    [
        (10, 0.0, 119.9, False),
        (10, 0.0, 120.0, True),
        (10, 100.0, 399.9, False),
        (10, 100.0, 400.0, True),
        (9, 0.0, 599.9, False),
        (9, 0.0, 600.0, True),
    ],
)
def test_the_bounds_are_those_of_the_documentation(steps: int, longest_s: float, waits_s: float, is_hung: bool) -> None:
    watch, now = watched(steps, longest_s=longest_s)
    now[0] += waits_s
    assert watch.is_hung(120.0) is is_hung


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 100)), max_size=40))
def test_a_clock_counts_of_a_gap_what_its_owner_could_have_been_awake(gaps: list[tuple[bool, float]]) -> None:
    now = 0.0
    clock = AwakeClock(lambda: now, max_gap_s=2.0)
    expected, gap, before = 0.0, 0.0, 0.0
    for ticks, seconds in gaps:
        now += seconds
        gap += seconds
        assert clock() == pytest.approx(expected + min(gap, 2.0))
        assert clock() >= before, "it never goes back"
        before = clock()
        if ticks:
            clock.tick()
            expected, gap = expected + min(gap, 2.0), 0.0
