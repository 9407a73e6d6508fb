"""How long each stage of a request takes."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Literal

__all__ = ["Stage", "Stopwatch", "Timings", "untimed"]

Stage = Literal["parse", "fetch", "digest", "layout", "process", "render", "send", "first_token"]

Timings = Callable[[float, Stage], None]
"""Is told how many seconds a stage took."""


def untimed(seconds: float, stage: Stage) -> None:
    """For those who do not want to know."""


class Stopwatch:
    """Takes the time of one request, stage by stage, from the moment it is made. What fails is not told."""

    __slots__ = ("_at", "_timings")

    def __init__(self, timings: Timings) -> None:
        self._timings = timings
        self._at = perf_counter()

    def lap(self, stage: Stage) -> None:
        """What happened since the last lap was this stage."""
        now = perf_counter()
        self._timings(now - self._at, stage)
        self._at = now
