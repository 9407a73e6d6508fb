"""Shares of tenants in the processes of a pool (threats S29). Pure: the clock is passed in.

While others have asked within ten minutes, a tenant has at most all processes but one: an expensive item keeps its
process for up to `--max-processing-s`, and nothing is preempted. Among tenants that wait, the one that has used the
least CPU time is next. A tenant that comes back starts from the least of those that are at it: to have been idle earns
nothing, and to have been busy alone costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

__all__ = ["ProcessShares"]

_ABOUT_S: Final = 600.0


@dataclass(slots=True)
class _Tenant:
    seen_s: float = 0.0
    used_s: float = 0.0
    pending: int = 0
    """Its items that wait or are worked on."""
    running: int = 0


class ProcessShares:
    """Processes and CPU time that tenants have used."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._tenants: dict[str, _Tenant] = {}
        """Those that have asked lately, in the order in which they did."""

    @property
    def several(self) -> bool:
        """Return whether more than one tenant has asked lately."""
        return len(self._tenants) > 1

    def ask(self, name: str) -> None:
        """A tenant's item has come."""
        now_s = self._now()
        tenant = self._tenants.pop(name, None) or _Tenant()
        if not tenant.pending:
            at_it = [other.used_s for other in self._tenants.values() if other.pending]
            tenant.used_s = max(tenant.used_s, min(at_it)) if at_it else tenant.used_s
        tenant.seen_s = now_s
        tenant.pending += 1
        self._tenants[name] = tenant
        while (oldest := next(iter(self._tenants.items())))[1].seen_s < now_s - _ABOUT_S:
            if oldest[1].pending or oldest[1].running:
                break
            del self._tenants[oldest[0]]

    def may_begin(self, name: str, processes: int) -> bool:
        """Return whether a tenant may have one more of so many processes."""
        return self._tenants[name].running < max(1, processes - self.several)

    def used_s(self, name: str) -> float:
        """Return the CPU time that orders tenants: who has the least is next."""
        return self._tenants[name].used_s

    def begin(self, name: str) -> None:
        """A tenant's item gets a process."""
        self._tenants[name].running += 1

    def end(self, name: str, used_s: float) -> None:
        """A process has ended a tenant's item, and has used so much time for it."""
        tenant = self._tenants[name]
        tenant.running -= 1
        tenant.used_s += used_s

    def leave(self, name: str) -> None:
        """A tenant's item waits no more, and is not worked on."""
        self._tenants[name].pending -= 1
