"""The rate limit of refusals: a burst is answered at once, more only at a limited rate (threats S18).

A refusal is cheap, but a client that sends the next bad request right after each refusal could keep a frontend busy. A
delayed refusal costs nothing while it waits, and slows down its client. Pure: the clock is passed in.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from semel.frontend.limits import RefusalLimits

__all__ = ["RefusalLimits", "RefusalThrottle"]


class RefusalThrottle:
    """Delays the refusals of one tenant."""

    __slots__ = ("_due", "_limits", "_now")

    def __init__(self, limits: RefusalLimits, now: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._now = now
        self._due = float("-inf")

    def wait_s(self) -> float:
        """How long the next refusal has to wait."""
        limits = self._limits
        if not limits.per_s:
            return 0.0
        now = self._now()
        earliest = now - limits.burst / limits.per_s
        self._due = min(max(self._due, earliest) + 1 / limits.per_s, now + limits.max_wait_s)
        return max(self._due - now, 0.0)
