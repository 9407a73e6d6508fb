"""The retry policy: a request that failed goes to another worker or not, and counts against its worker or not.

A request goes elsewhere once, as long as nothing of its answer has been given out, and never because it takes long: its
worker has failed it, or is lost. If the other worker answers it, the first one is at fault. If both fail, the request
is: it counts against neither, or a client with a request that engines fail on could have half of a fleet ejected. What
an engine died of is another matter (`quarantine`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from semel.errors import FeatureRejected, NotReady, SemelError, ServiceError, WorkerLost
from semel.fleet.ejection import Attempt, EjectionLimits, OutlierEjection
from semel.fleet.quarantine import Content, EngineRun, Quarantine
from semel.telemetry import Meter, metrics

__all__ = ["FleetHealth", "RetryPolicy", "is_worker_fault"]

logger = logging.getLogger(__name__)


def is_worker_fault(error: SemelError) -> bool:
    """Return whether an error that a worker reported, or its loss, is the worker's own fault.

    Not a request that is refused, or that ran into its own structured output (threats S31); nor a feature, which a
    client may have sent; nor an engine whose queue is full: ejecting that worker would fill the queues of the others.
    """
    return isinstance(error, ServiceError) and error.status >= 500 and not isinstance(error, FeatureRejected | NotReady)


class FleetHealth(OutlierEjection):
    """Outlier ejection with its log and metrics, and the quarantine of requests that engines died of."""

    def __init__(
        self,
        limits: EjectionLimits | None = None,
        *,
        meter: Meter | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(limits, now=now)
        self.quarantine = Quarantine(now=now)
        self._meter = meter or Meter()

    def succeed(self, attempt: Attempt) -> bool:
        """Note an answer, as the base class does, and log a worker that is back."""
        if is_back := super().succeed(attempt):
            logger.info("the worker at %s gets requests again: it has answered one", attempt.worker)
        return is_back

    def fail(self, attempt: Attempt) -> float:
        """Note a failure, as the base class does, and log and count an ejection."""
        if seconds := super().fail(attempt):
            self._meter.count(metrics.WORKER_EJECTIONS)
            logger.warning("the worker at %s fails requests and gets none for %g s", attempt.worker, seconds)
        return seconds

    def count_retry(self, error: SemelError) -> None:
        """Count a request that goes to another worker because of an error."""
        self._meter.count(metrics.FAILOVERS, error.code if isinstance(error, ServiceError) else ServiceError.code)


class RetryPolicy:
    """The attempts of one request, as its streams report them."""

    def __init__(
        self, health: FleetHealth, has_other: Callable[[str], bool], content: Content, *, is_whole: bool
    ) -> None:
        self._health = health
        self._quarantine = health.quarantine
        self._under_way = self._quarantine.enter(content)
        self._saw_death = False  # of an engine, with it under way
        self._has_other = has_other
        self._is_whole = is_whole  # nothing of the answer is given out before it is complete
        self._attempt: Attempt | None = None
        self._suspect: Attempt | None = None  # the first attempt if it failed, until it is clear whose fault that was
        self._is_second = False

    @property
    def needs_idle_worker(self) -> bool:
        """Return whether it may have killed an engine, and has the next one to itself."""
        return self._saw_death

    def may_retry_at(self, worker: str) -> bool:
        """Return whether it can have a worker's engine to itself now; raises if it is refused meanwhile."""
        self._quarantine.check_strikes(self._under_way)
        return self._quarantine.may_retry_isolated(self._under_way, worker)

    def begin(self, engine: EngineRun) -> None:
        """Begin an attempt at a worker's engine: the first, or the other."""
        worker = engine.worker
        self._quarantine.submit(self._under_way, engine, isolated=self.needs_idle_worker)
        if self._attempt is not None and self._attempt is not self._suspect:
            self._health.cancel(self._attempt)
        self._is_second |= self._attempt is not None
        self._attempt = self._health.begin(worker, self._under_way.content.tenant)

    def pass_over(self) -> None:
        """Pass over the worker that it was prepared for, which does not serve any more: there is one other attempt.

        Nothing is recorded of that worker: it may have been removed, and would never be forgotten again.
        """
        self._is_second = True

    def goes_on(self, begun: bool) -> bool:
        """Return whether another worker gets it if this one fails it, now or after its answer has begun."""
        worker = "" if self._attempt is None else self._attempt.worker
        return not self._is_second and self._has_other(worker) and (self._is_whole or not begun)

    def is_resumable(self, error: SemelError) -> bool:
        """Return whether an error is one that another worker may not make."""
        return self._suspect is not None or isinstance(error, WorkerLost | NotReady)

    def on_output(self) -> None:
        """Note the first output: nothing is wrong with the request."""
        self._quarantine.release_engine(self._under_way)
        self._blame()

    def on_finish(self) -> None:
        """Note that the answer is complete."""
        self._quarantine.finish(self._under_way)
        if self._attempt is not None:
            self._health.succeed(self._attempt)

    def on_failure(self, error: SemelError, begun: bool) -> None:
        """Note that the worker has given up, or is lost."""
        if isinstance(error, WorkerLost) and error.is_death:
            self._saw_death = True
            self._quarantine.die(self._under_way)
        if self._attempt is None:
            return
        if not is_worker_fault(error):
            self._health.cancel(self._attempt)
            self._blame()
            return
        self._health.charge(self._attempt.worker)
        if self._suspect is not None:
            self._health.cancel(self._suspect)
            self._health.cancel(self._attempt)
            self._suspect = None
        elif self.goes_on(begun):
            self._suspect = self._attempt
        else:
            self._health.fail(self._attempt)

    def on_abort(self, begun: bool) -> None:
        """Note that nobody waits for the rest of the answer."""
        if self._attempt is not None and begun:
            self._health.succeed(self._attempt)
        self.settle()

    def settle(self) -> None:
        """End it."""
        self._quarantine.leave(self._under_way)
        self._blame()
        if self._attempt is not None:
            self._health.cancel(self._attempt)

    def _blame(self) -> None:
        if self._suspect is not None:
            self._health.fail(self._suspect)
            self._suspect = None
