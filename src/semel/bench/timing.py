"""Timing two things against each other.

They take turns, so that a slow second of the machine is slow for both, and the median of what the turns show is taken.
What counts is the processor time of this thread: waiting for a busy processor does not.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import thread_time_ns

__all__ = ["Compared", "compare", "time_s", "without_garbage_collection"]


@dataclass(frozen=True, slots=True)
class Compared:
    """The medians of many turns."""

    baseline_s: float
    ours_s: float
    ratio: float
    """How many times the baseline takes as long: the median over turns, not the ratio of the medians."""


def time_s(work: Callable[[], object], *, times: int = 1) -> float:
    """The seconds of one run of `work`, over so many."""
    started = thread_time_ns()
    for _ in range(times):
        work()
    return (thread_time_ns() - started) / times / 1e9


def compare(baseline: Callable[[], float], ours: Callable[[], float], *, turns: int) -> Compared:
    """Let two things take turns; each prepares, runs and times itself once per turn, and returns the seconds."""
    with without_garbage_collection():
        times = [(baseline(), ours()) for _ in range(turns)]
    return Compared(
        median(theirs for theirs, _ in times),
        median(mine for _, mine in times),
        median(theirs / mine for theirs, mine in times),
    )


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Whom it hits is chance."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
