"""Timing two things against each other.

They take turns, so that a slow minute of the machine is slow for both, and the medians are compared. What counts is the
processor time of this thread: other processes on the machine do not.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from time import thread_time_ns

__all__ = ["interleave", "quiet", "time_s"]

Timed = Callable[[], float]
"""Prepares, runs and times one thing; the seconds."""


def time_s(work: Callable[[], object], *, times: int = 1) -> float:
    """The seconds of one run of `work`, over so many."""
    with quiet():
        started = thread_time_ns()
        for _ in range(times):
            work()
        return (thread_time_ns() - started) / times / 1e9


def interleave(*things: Timed, rounds: int) -> tuple[float, ...]:
    """The median seconds of each thing, over rounds in which each has a turn."""
    turns = [[thing() for thing in things] for _ in range(rounds)]
    return tuple(median(turn) for turn in zip(*turns, strict=True))


@contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection meanwhile: whom it hits is chance."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
