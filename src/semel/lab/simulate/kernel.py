"""Events in order of time: the clock of the decisions. Events of one time come in the order in which they were set."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any

__all__ = ["Kernel"]


class Kernel:
    """A heap of calls, and the time of the one that runs now."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = count()

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        """Call at a time; if that is over, now."""
        heappush(self._events, (max(when, self.now), next(self._numbers), call, args))

    def after(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        """Call after a time."""
        self.at(self.now + seconds, call, *args)

    def run(self, until: float = inf) -> None:
        """Run until nothing is due, or nothing before a time."""
        events = self._events
        while events and events[0][0] <= until:
            self.now, _, call, args = heappop(events)
            call(*args)
