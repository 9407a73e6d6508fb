"""Outlier ejection: workers that fail get no requests for a while. A clock is passed in.

A worker that fails at once has nothing to do, and looks like the best choice. So its failures count as load for a
while, and it is ejected: after some failures in a row, or when half of its requests fail. It is out for 10 s, and then
gets trial requests, one at a time: the first that succeeds brings it back, one that fails puts it out for twice as
long. A worker that has served for as long as it was out begins anew. However many fail, at least half of the fleet is
available: the workers that are nearest to their return are let in then. Time must never go back.

A tenant that knows how to make requests fail could have half of a fleet ejected (threats S31). So while others have
asked within 10 minutes, the failures of one tenant eject nobody, however many they are, and its failed trials do not
double the time: there have to be failures of a second one. A tenant that fails now and then does not count as the
second where the share of failures is looked at: half of its own requests have to fail.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from semel.core.flag import flag
from semel.fairness.recent_tenants import RecentTenants

__all__ = ["FIRST_S", "MAX_S", "MIN_VERDICTS", "WINDOW_S", "Attempt", "EjectionLimits", "OutlierEjection"]

WINDOW_S: Final = 10.0  # for which a failure counts as load, and of which the share of failures is taken
MIN_VERDICTS: Final = 10  # that a share of failures needs to mean anything
FIRST_S: Final = 10.0  # for which a worker is out the first time
MAX_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class EjectionLimits:
    """The limits of failures."""

    eject_after: int = flag(
        3,
        "eject-after-failures",
        help="Failures in a row after which a worker is ejected: it gets no requests for 10 s, and longer if it fails "
        "again. Failing half of ten requests ejects it too. With several tenants, two of them must have failures. At "
        "most half of the workers are ejected. 0 ejects none.",
        group="Fleet",
        min=0,
    )


class _Verdict(NamedTuple):
    at_s: float
    failed: bool
    tenant: str


@dataclass(slots=True)
class _Tally:
    verdicts: int = 0
    failed: int = 0


@dataclass(slots=True, eq=False)
class _Record:
    """The requests of one worker, as they ended."""

    streak: int = 0  # of failures
    failing: set[str] = field(
        default_factory=set
    )  # tenants of the streak, or of the trials that failed since it is out
    verdicts: deque[_Verdict] = field(default_factory=deque)  # of the window
    tallies: dict[str, _Tally] = field(default_factory=dict)  # the same by tenant
    failed: int = 0
    charges: deque[float] = field(default_factory=deque)  # times of the failures that count as load
    ejections: int = 0
    out_until: float | None = None  # its trials begin then; None while it serves
    out_s: float = 0.0  # of the last ejection
    returned: float = 0.0
    trial: Attempt | None = None

    def count(self, verdict: _Verdict, sign: int) -> None:
        """Add a verdict to the window's sums, or take it out of them."""
        tally = self.tallies.setdefault(verdict.tenant, _Tally())
        tally.verdicts += sign
        tally.failed += sign * verdict.failed
        self.failed += sign * verdict.failed
        if not tally.verdicts:
            del self.tallies[verdict.tenant]

    @property
    def several_fail(self) -> bool:
        """Return whether of two tenants at least half of the requests have failed."""
        return sum(2 * tally.failed >= tally.verdicts for tally in self.tallies.values()) > 1


@dataclass(slots=True, eq=False)
class Attempt:
    """One request at one worker, until there is a verdict on it. Made by `OutlierEjection.begin`."""

    worker: str
    tenant: str
    record: _Record = field(repr=False)
    ejection: int  # of the worker in which it began, counted from 1; 0 if it was not ejected
    is_trial: bool
    is_open: bool = True


class OutlierEjection:
    """The workers of a fleet by their names, and how their requests ended."""

    def __init__(self, limits: EjectionLimits | None = None, *, now: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits or EjectionLimits()
        self._now = now
        self._records: dict[str, _Record] = {}
        self._ejected: set[str] = set()
        self._tenants = RecentTenants()
        self.charged: set[str] = set()  # workers of which failures may count as load

    def begin(self, worker: str, tenant: str = "") -> Attempt:
        """Begin a request of a tenant at a worker: as its trial, if there is to be one."""
        now = self._now()
        self._tenants.see(tenant, now)
        record = self._records.setdefault(worker, _Record())
        if record.out_until is None:
            return Attempt(worker, tenant, record, 0, is_trial=False)
        is_trial = record.trial is None and now >= record.out_until
        attempt = Attempt(worker, tenant, record, record.ejections, is_trial=is_trial)
        if is_trial:
            record.trial = attempt
        return attempt

    def succeed(self, attempt: Attempt) -> bool:
        """Note an answer. Returns whether it brings the worker back. Only the first verdict on an attempt counts."""
        if (record := self._close(attempt)) is None:
            return False
        now = self._now()
        if record.out_until is None:
            record.streak = 0
            record.failing.clear()
            self._judge(record, _Verdict(now, False, attempt.tenant))
            return False
        if attempt.ejection != record.ejections:
            return False  # it began before the worker was ejected, and tells nothing of today
        record.out_until, record.returned = None, now
        record.failing.clear()
        self._ejected.discard(attempt.worker)
        return True

    def fail(self, attempt: Attempt) -> float:
        """Note a failure of the worker. Returns for how many seconds that ejects the worker, or 0."""
        if (record := self._close(attempt)) is None:
            return 0.0
        now = self._now()
        if record.out_until is None:
            record.streak += 1
            record.failing.add(attempt.tenant)
            self._judge(record, _Verdict(now, True, attempt.tenant))
            if not self._is_outlier(record, is_alone=self._tenants.is_alone(attempt.tenant, now)):
                return 0.0
            begins_anew = now - record.returned >= record.out_s
            record.failing.clear()
            return self._eject(attempt.worker, record, now, FIRST_S if begins_anew else 2 * record.out_s)
        if not attempt.is_trial:
            return 0.0
        record.failing.add(attempt.tenant)
        doubles = len(record.failing) > 1 or self._tenants.is_alone(attempt.tenant, now)
        return self._eject(attempt.worker, record, now, (1 + doubles) * record.out_s)

    def cancel(self, attempt: Attempt) -> None:
        """End an attempt in a way that tells nothing of its worker."""
        self._close(attempt)

    def charge(self, worker: str) -> None:
        """Let a failure count as load, from now on, unless the worker is no more."""
        if (record := self._records.get(worker)) is not None:
            record.charges.append(self._now())
            self.charged.add(worker)

    def load(self, worker: str) -> int:
        """Count the failures of a worker that are load."""
        if (record := self._records.get(worker)) is None:
            return 0
        while record.charges and record.charges[0] <= self._now() - WINDOW_S:
            record.charges.popleft()
        if not record.charges:
            self.charged.discard(worker)
        return len(record.charges)

    @property
    def has_ejected(self) -> bool:
        """Return whether any worker is out or on trial."""
        return bool(self._ejected)

    def is_ejected(self, worker: str) -> bool:
        """Return whether a worker is out or on trial."""
        return worker in self._ejected

    def left_out(self, workers: Collection[str], is_preparing: Callable[[str], bool]) -> list[str]:
        """Return the workers that get no requests: the ejected, and never more than half.

        One whose time is over gets one, unless a trial is under way or in preparation. Only ejected workers are looked
        at: of a thousand that is seldom more than a few.
        """
        out, now = {}, self._now()
        for worker in self._ejected:
            if worker in workers:
                record = self._records[worker]
                until = record.out_until or 0.0
                if now < until or record.trial is not None or is_preparing(worker):
                    out[worker] = until
        return sorted(out, key=lambda worker: (-out[worker], worker))[: len(workers) // 2]

    def forget(self, worker: str) -> None:
        """Forget a worker; one that comes by its name is new."""
        self._records.pop(worker, None)
        self._ejected.discard(worker)
        self.charged.discard(worker)

    def _close(self, attempt: Attempt) -> _Record | None:
        """Return the record of its worker, for the first verdict on an attempt."""
        record = attempt.record
        if not attempt.is_open or self._records.get(attempt.worker) is not record:
            return None
        attempt.is_open = False
        if record.trial is attempt:
            record.trial = None
        return record

    def _judge(self, record: _Record, verdict: _Verdict) -> None:
        record.verdicts.append(verdict)
        record.count(verdict, 1)
        while record.verdicts[0].at_s <= verdict.at_s - WINDOW_S:
            record.count(record.verdicts.popleft(), -1)

    def _is_outlier(self, record: _Record, *, is_alone: bool) -> bool:
        if not self._limits.eject_after:
            return False
        if record.streak >= self._limits.eject_after and (is_alone or len(record.failing) > 1):
            return True
        many = len(record.verdicts) >= MIN_VERDICTS
        return many and 2 * record.failed >= len(record.verdicts) and (is_alone or record.several_fail)

    def _eject(self, worker: str, record: _Record, now: float, seconds: float) -> float:
        record.out_s = min(seconds, MAX_S)
        record.out_until = now + record.out_s
        record.ejections += 1
        record.streak = record.failed = 0
        record.verdicts.clear()
        record.tallies.clear()
        self._ejected.add(worker)
        return record.out_s
