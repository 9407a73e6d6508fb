"""Times after which refused requests should come again (`Retry-After`). Pure: the clock is passed in.

Those who were refused are thought of as a queue before the places: each gets the time of its turn, at the rate at
which places have become free since somebody was refused. So they come back as fast as they can be served, and later
the more of them there are. Each tenant has a queue of its own: one that is refused often does not make another wait.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

__all__ = ["RetryQueue"]

_SEEN: Final = 64  # places that became free last, by which the rate is known
_MIN_S: Final = 1.0
_MAX_S: Final = 30.0  # a client that would come back later has given up


class RetryQueue:
    """The queue before some places."""

    __slots__ = ("_due", "_freed", "_last", "_now")

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._freed: deque[float] = deque(maxlen=_SEEN)
        self._due: dict[str, float] = {}
        self._last = float("-inf")  # time of the last refusal

    def free(self) -> None:
        """Note that a place has become free."""
        self._freed.append(self._now())

    def after_s(self, tenant: str) -> float:
        """Return in how many seconds a tenant's request should come again that is refused now."""
        now = self._now()
        if now - self._last > _MAX_S:  # there was room meanwhile: how fast it became free tells nothing
            self._freed.clear()
            self._freed.append(now)
        self._last = now
        turn_s = (now - self._freed[0]) / len(self._freed)
        due = min(max(self._due.get(tenant, now), now) + turn_s, now + _MAX_S)
        self._due[tenant] = due
        return max(due - now, _MIN_S)
