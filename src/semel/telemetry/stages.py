"""Durations of the stages of a request."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Literal

__all__ = ["Stage", "Stopwatch", "Timings", "untimed"]

Stage = Literal["parse", "fetch", "digest", "layout", "process", "render", "send", "first_token"]

Timings = Callable[[float, Stage], None]
"""Receives the duration of a stage in seconds."""


def untimed(seconds: float, stage: Stage) -> None:
    """Ignores durations."""


class Stopwatch:
    """Measures one request, stage by stage, from its creation on. Stages that fail are not reported."""

    __slots__ = ("_at", "_timings")

    def __init__(self, timings: Timings) -> None:
        self._timings = timings
        self._at = perf_counter()

    def lap(self, stage: Stage) -> None:
        """Report the time since the last lap as the duration of this stage."""
        now = perf_counter()
        self._timings(now - self._at, stage)
        self._at = now
