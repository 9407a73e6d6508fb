"""The instruments of the fleet's tests: what they let pass, and what they do not."""

from __future__ import annotations

from typing import Any

import pytest

from semel.errors import WorkerLost
from tools.fleet.driving import CUT_OFF, WRONG, fault_of

LOST = {"code": WorkerLost.code, "message": "the worker was lost"}
RIGHT = ([5, 6, 7], "abc", [[("a", -1.0)], [("b", -1.0)], [("c", -1.0)]])


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
