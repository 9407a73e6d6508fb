"""Progress of an engine: steps are counted, not signs of life (threats S22). Pure, the time is passed in.

A hung engine has processes that live and connections that are open; what it lacks is steps. So the clock runs while a
request is under way, stops without one, and begins anew with each step. It does not begin anew with the next request:
clients that give up and send again would hide a hung engine for ever. What keeps an engine from its steps on purpose,
such as a pause or new weights, suspends the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from semel.core.flag import flag

__all__ = ["FIRST_S", "FIRST_STEPS", "MAX_GAP_S", "STEP_FACTOR", "AwakeClock", "ProgressLimits", "StepWatch"]

FIRST_STEPS: Final = 10
FIRST_S: Final = 600.0
"""Seconds that one of an engine's first steps may take: it may compile or capture graphs."""

MAX_GAP_S: Final = 2.0
"""Between two looks at the clock."""

STEP_FACTOR: Final = 4
"""A step may take so many times as long as the longest one before it."""


@dataclass(frozen=True, slots=True)
class ProgressLimits:
    """Limits after which an engine counts as hung."""

    engine_progress_s: float = flag(
        120.0,
        help="Seconds without a step of the engine, while a request runs, after which the engine counts as "
        "hung: the worker ends it and exits. Four times the longest step so far if that is more, and 600 "
        "s until the tenth step. 0 turns it off.",
        group="Worker",
        unit="seconds",
        min=0,
    )


class AwakeClock:
    """A clock that stands still while its owner does not run: a busy loop, a stopped process, a suspended machine.

    Its owner calls `tick` at least every `max_gap_s`. Of a longer gap only that much counts: what was not read in the
    rest of it is not missing.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic, *, max_gap_s: float = MAX_GAP_S) -> None:
        self._now = now
        self._max_gap_s = max_gap_s
        self._awake_s = 0.0
        self._ticked = now()

    def __call__(self) -> float:
        """Seconds that the owner was awake."""
        return self._awake_s + min(self._now() - self._ticked, self._max_gap_s)

    def tick(self) -> None:
        """Let the time since the last call count, up to the gap."""
        self._awake_s = self()
        self._ticked = self._now()


class StepWatch:
    """The steps of an engine, and the time that the current one takes."""

    def __init__(self, clock: AwakeClock | None = None) -> None:
        self.clock = clock or AwakeClock()
        """The watcher keeps it ticking; until there is one, the engine starts up, and next to no time passes."""

        self.steps = 0
        self.longest_s = 0.0
        """The longest step, as far as a request was under way."""

        self._requests = 0
        self._suspensions = 0
        self._waited_s = 0.0
        self._since: float | None = None
        """Start of the clock's current run; None while it does not run."""

    @property
    def waited_s(self) -> float:
        """Seconds for which a step has been awaited."""
        return self._waited_s + (0.0 if self._since is None else self.clock() - self._since)

    def set_requests(self, requests: int) -> None:
        """Set the number of requests that are under way."""
        self._requests = requests
        self._review()

    def step(self) -> None:
        """Count a step of the engine."""
        self.steps += 1
        self.longest_s = max(self.longest_s, self.waited_s)
        self._waited_s = 0.0
        self._since = None
        self._review()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Let the clock stand still inside."""
        self.suspend()
        try:
            yield
        finally:
            self.resume()

    def suspend(self) -> None:
        """Let the clock stand still until `resume`, which is called as often."""
        self._suspensions += 1
        self._review()

    def resume(self) -> None:
        """Let the clock run again."""
        assert self._suspensions, "nothing is suspended"
        self._suspensions -= 1
        self._review()

    def limit_s(self, progress_s: float) -> float:
        """Return how long a step may take."""
        return max(progress_s, STEP_FACTOR * self.longest_s, FIRST_S if self.steps < FIRST_STEPS else 0.0)

    def is_hung(self, progress_s: float) -> bool:
        """Return whether the engine makes no progress; never if `progress_s` is 0."""
        return progress_s > 0 and self.waited_s >= self.limit_s(progress_s)

    def _review(self) -> None:
        runs = self._requests > 0 and not self._suspensions
        if runs == (self._since is not None):
            return
        self._waited_s, self._since = self.waited_s, self.clock() if runs else None
