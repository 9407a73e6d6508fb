"""How fast refusals are answered: some at once, and more of them only so many a second (threats S18).

To refuse costs little, but who sends the next bad request as soon as the last one is refused can keep a frontend busy
with nothing else. A refusal that has to wait costs nothing while it waits, and slows whoever waits for it. Pure: the
clock is passed in.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from semel.frontend.limits import RefusalLimits

__all__ = ["RefusalLimits", "RefusalThrottle"]


class RefusalThrottle:
    """The refusals of one tenant."""

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
