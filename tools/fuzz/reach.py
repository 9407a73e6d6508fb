"""Which lines an input makes a target go through, one after the other: what decides whether a corpus gains by it.

Python's own tracing, not the fuzzer's counters: those die with its process. It is ten times slower, and run seldom.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from types import FrameType
from typing import Any

from tools.fuzz.target import Run

Step = tuple[str, int, int]
"""A module, and two lines that were run in turn."""

_Trace = Callable[[FrameType, str, Any], Any]


def reached(run: Run, data: bytes, packages: Collection[str]) -> set[Step]:
    """The steps through modules of these packages; an input that is a finding reaches nothing."""
    steps: set[Step] = set()

    def enter(frame: FrameType, _: str, __: Any) -> _Trace | None:
        name = str(frame.f_globals.get("__name__", ""))
        if not any(name == package or name.startswith(f"{package}.") for package in packages):
            return None
        return _follow(name, frame.f_lineno, steps)

    before = sys.gettrace()
    sys.settrace(enter)
    with suppress(Exception):
        run(data)
        sys.settrace(before)
        return steps
    sys.settrace(before)
    return set()


def _follow(name: str, line: int, steps: set[Step]) -> _Trace:
    def follow(frame: FrameType, event: str, _: Any) -> _Trace:
        nonlocal line
        if event == "line":
            steps.add((name, line, frame.f_lineno))
            line = frame.f_lineno
        return follow

    return follow
