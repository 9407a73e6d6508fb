"""The engine of a worker on the kernel: `EngineModel`, with steps in which nothing comes or ends taken at once."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any

from semel.lab.simulate.costs import Costs
from semel.lab.simulate.engine import EngineLimits, EngineModel, Job

__all__ = ["Batches", "Kernel"]


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


class _SkippingModel(EngineModel):
    """Knows how many of its next steps are alike."""

    def alike(self) -> int:
        """Of the step that has begun and those after it: how many until an answer ends, if nothing else comes."""
        return 1 if self._waiting or self._prefilling else self._ends[0][0] - self.steps

    def skip(self, steps: int) -> None:
        """So many steps like the one that has begun are over, which is yet to be finished."""
        self.steps += steps


class Batches:
    """An engine that steps as long as it has requests. It calls `on_token` for each job whose answer begins or ends."""

    def __init__(self, kernel: Kernel, costs: Costs, limits: EngineLimits, on_token: Callable[[Job], None]) -> None:
        self.model = _SkippingModel(costs, limits)
        self._kernel = kernel
        self._on_token = on_token
        self._version = 0
        self._steps = 0
        """That are under way: 0 while it has nothing to do."""

        self._began = self._step_s = 0.0

    def add(self, job: Job) -> None:
        """A request comes: it is part of the next step."""
        self.model.add(job)
        if not self._steps:
            self._begin()
        elif self._steps > 1:
            done = int((self._kernel.now - self._began) / self._step_s) + 1
            if done < self._steps:
                self._steps = done
                self._set_end()

    def stop(self) -> None:
        """The engine is no more."""
        self._version += 1
        self._steps = 0

    def _begin(self) -> None:
        seconds = self.model.begin()
        if seconds is None:
            self._steps = 0
            return
        self._began, self._step_s, self._steps = self._kernel.now, seconds, self.model.alike()
        self._set_end()

    def _set_end(self) -> None:
        self._version += 1
        self._kernel.at(self._began + self._steps * self._step_s, self._end, self._version)

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        if self._steps > 1:
            self.model.skip(self._steps - 1)
        for job in self.model.finish():
            self._on_token(job)
        if version == self._version:
            self._begin()
