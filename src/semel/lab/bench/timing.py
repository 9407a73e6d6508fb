"""Times two functions against each other.

They alternate, so that a slow second of the machine is slow for both, and the result is the median over the rounds. The
time is the CPU time of this thread: waiting for a busy processor does not count.
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
    """The medians of many rounds."""

    baseline_s: float
    ours_s: float
    ratio: float
    """How many times as long the baseline takes: the median over rounds, not the ratio of the medians."""


def time_s(work: Callable[[], object], *, times: int = 1) -> float:
    """Return the seconds of one run of `work`, averaged over `times` runs."""
    started = thread_time_ns()
    for _ in range(times):
        work()
    return (thread_time_ns() - started) / times / 1e9


def compare(baseline: Callable[[], float], ours: Callable[[], float], *, turns: int) -> Compared:
    """Alternate between two functions. Each prepares, runs and times itself once per round, and returns the seconds."""
    with without_garbage_collection():
        times = [(baseline(), ours()) for _ in range(turns)]
    return Compared(
        median(theirs for theirs, _ in times),
        median(mine for _, mine in times),
        median(theirs / mine for theirs, mine in times),
    )


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Turn garbage collection off: which side it interrupts is chance."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
