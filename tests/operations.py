"""What a call costs, counted and not timed: the same number on every machine, however busy it is.

Python's own work is counted by its bytecodes. Work inside C functions is seen by the numbers it looks at (`Tally`, an
int whose every comparison and sum is a call of Python) and by the memory that it takes.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from math import inf
from types import FrameType
from typing import Any

TraceFunction = Callable[[FrameType, str, Any], Any]


class Tally(int):
    """An int that cannot be compared or added to without bytecodes being run."""

    def __lt__(self, other: int) -> bool:
        return int(self) < int(other)

    def __le__(self, other: int) -> bool:
        return int(self) <= int(other)

    def __gt__(self, other: int) -> bool:
        return int(self) > int(other)

    def __ge__(self, other: int) -> bool:
        return int(self) >= int(other)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and int(self) == int(other)

    def __hash__(self) -> int:
        return hash(int(self))

    def __add__(self, other: int) -> Tally:
        return Tally(int(self) + int(other))

    __radd__ = __add__


def operations(work: Callable[[], object], *, at_most: float = inf) -> int:
    """The bytecodes that a call runs, in all the Python that it reaches; over the limit it is not run to its end."""
    with counting_operations(at_most=at_most) as counted:
        work()
        return counted.operations  # without those that end the counting


@dataclass
class Count:
    """What has been counted so far."""

    operations: int = 0


_COUNTED: ContextVar[Count | None] = ContextVar("_COUNTED", default=None)


@contextmanager
def counting_operations(*, at_most: float = inf, own: bool = False) -> Iterator[Count]:
    """Count the bytecodes that this thread runs meanwhile, but for those of the function that counts.

    With `own`, only those of the caller and of the tasks and callbacks that it starts: neither a heartbeat nor a timer
    of others that comes due meanwhile.
    """
    counted = Count()
    token = _COUNTED.set(counted)

    def trace(frame: FrameType, event: str, _: object) -> TraceFunction | None:
        if own and _COUNTED.get() is not counted:
            return None
        frame.f_trace_opcodes = True
        counted.operations += event == "opcode"
        assert counted.operations <= at_most, f"it takes more than {at_most:g} operations"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # a collection calls finalizers, and hypothesis' callback, whenever it is due
    sys.settrace(trace)
    try:
        yield counted
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
        _COUNTED.reset(token)


def c_calls(work: Callable[[], object]) -> list[str]:
    """The functions of C that a call reaches."""
    names: list[str] = []

    def profile(_: FrameType, event: str, called: object) -> None:
        if event == "c_call" and called is not sys.setprofile:
            names.append(getattr(called, "__qualname__", repr(called)))

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(before)
    return names


def peak_bytes(work: Callable[[], object], *refusals: type[Exception]) -> int:
    """The most memory that a call has at a time: a copy of a list shows, even if no element of it is looked at.

    It may end with one of the errors.
    """
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        with suppress(*refusals):
            work()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
