"""What a run of CI spends, by stage: minutes, and starts of engines, of which there may be so many and no more.

`.ci/run` keeps a folder of notes. `stages` has a line for the beginning of each stage: the time in seconds, the engines
started so far, and a name; `starts` has a line for each engine. The last stage is a run of pytest, which
shows both before its closing line and fails over the budget.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest

MAX_ENGINE_STARTS: Final = 24
NOTES: Final = "SEMEL_CI_NOTES"
IS_ENDING: Final = "SEMEL_CI_IS_ENDING"


@dataclass(frozen=True)
class Stage:
    """A part of CI, and what it spent."""

    name: str
    minutes: float
    starts: int


def stages_of(lines: Iterable[str], now_s: float, starts: int) -> Iterator[Stage]:
    """The stages that these lines begin; the last one goes on until now."""
    begun = [line.split(maxsplit=2) for line in lines]
    for (began, before, name), (ended, after, _) in pairwise([*begun, [str(now_s), str(starts), ""]]):
        yield Stage(name.strip(), (float(ended) - float(began)) / 60, int(after) - int(before))


def check_starts(starts: int) -> None:
    """Fail if so many engines are too many, or if nobody counted."""
    assert starts > 0, "no engine was counted: is tests/engine_starts on PYTHONPATH, and does vLLM load it?"
    assert starts <= MAX_ENGINE_STARTS, (
        f"CI started {starts} engines, {MAX_ENGINE_STARTS} are its budget: share one (tests/engine/engines.py), "
        f"or mark a test nightly"
    )


@pytest.fixture(scope="session", autouse=True)
def engine_budget() -> Iterator[None]:
    """Torn down after all others: in CI's last stage, an error of the last test says that the budget is overdrawn."""
    yield
    if IS_ENDING in os.environ:
        check_starts(len(_lines("starts")))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the table, in CI's last stage."""
    if IS_ENDING not in os.environ:
        return
    started = _lines("starts")
    stages = list(stages_of(_lines("stages"), time.time(), len(started)))
    stages.append(Stage("in all", sum(stage.minutes for stage in stages), len(started)))
    terminalreporter.section("CI by stage")
    terminalreporter.write_line(f"{'minutes':>8}  {'engines':>7}")
    for stage in stages:
        terminalreporter.write_line(f"{stage.minutes:8.1f}  {stage.starts:7}  {stage.name}")
    for line in started:
        terminalreporter.write_line(f"an engine for {line}")


def _lines(note: str) -> list[str]:
    path = Path(os.environ[NOTES]) / note
    return path.read_text().splitlines() if path.exists() else []
