"""The instruments of the fleet's tests: what they let pass, and what they do not."""

from __future__ import annotations

from typing import Any

import pytest

from semel.core import Digest
from semel.errors import WorkerLost
from tests.fleet.driving import CUT_OFF, WRONG, fault_of
from tests.fleet.plan import Kind, Repeats, plan_repeats
from tests.fleet.round_robin import RoundRobin

LOST = {"code": WorkerLost.code, "message": "the worker was lost"}
RIGHT = ([5, 6, 7], "abc", [[("a", -1.0)], [("b", -1.0)], [("c", -1.0)]])


@pytest.mark.parametrize("repeats", [0.0, 0.5, 0.8])
def test_the_share_of_repeats_is_exact_and_nothing_is_repeated_before_it_came(repeats: float) -> None:
    load = Repeats(300, repeats, streamed=0.5)
    asks = plan_repeats(load, 2)
    images = [ask.chat[0] for ask in asks]
    assert list(dict.fromkeys(images)) == list(range(round(300 * (1 - repeats))))
    assert {ask.frontend for ask in asks} == {0, 1}
    assert 100 < sum(ask.kind is Kind.STREAMED for ask in asks) < 200
    assert asks == plan_repeats(load, 2)


def test_a_stream_that_is_right_to_its_end_has_no_fault() -> None:
    assert fault_of(RIGHT, None, RIGHT) is None


@pytest.mark.parametrize(
    ("given", "error", "begins"),
    [
        (([5, 6], "ab", []), LOST, CUT_OFF),  # the only one that a killed worker excuses
        (([], "", []), LOST, "ended"),  # nothing had been streamed: another worker should have answered
        (([5, 6], "ab", []), "it has no end", "ended"),
        (([5, 6], "ab", []), {"code": "internal"}, "ended"),
        (([5, 9], "ax", []), LOST, WRONG),
        (([5, 6, 8], "abx", RIGHT[2]), None, WRONG),
        (([5, 6, 7, 5, 6, 7], "abcabc", RIGHT[2] * 2), None, WRONG),  # begun anew after something was given out
    ],
)
def test_what_is_wrong_with_a_stream_is_told_apart(given: Any, error: Any, begins: str) -> None:
    assert str(fault_of(given, error, RIGHT)).startswith(begins)


def test_round_robin_asks_one_after_another_whoever_holds_what() -> None:
    choose = RoundRobin()
    assert [choose(0b1011, [Digest(bytes(32))], [0b1], b"key") for _ in range(4)] == [0, 1, 3, 0]
