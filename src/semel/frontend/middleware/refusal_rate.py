"""The rate limit of refusals: a burst is answered at once, more only at a limited rate (threats S18).

A refusal is cheap, but a client that sends the next bad request right after each refusal could keep a frontend busy. A
delayed refusal costs nothing while it waits, and slows down its client. Pure: the clock is passed in.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from semel.core.lru import LruMap
from semel.frontend.limits import RefusalLimits

__all__ = ["AddressThrottle", "RefusalLimits", "RefusalThrottle"]

_MAX_ADDRESSES: Final = 4_096


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


class AddressThrottle:
    """Delays the refusals of requests without a valid key, by the address that they come from (threats S25).

    Only refusals ask it: a request with a valid key never waits, whatever others send from its address. Of more
    addresses than it can hold, it forgets those that were refused longest ago.
    """

    def __init__(
        self,
        limits: RefusalLimits,
        now: Callable[[], float] = time.monotonic,
        *,
        max_addresses: int = _MAX_ADDRESSES,
    ) -> None:
        self._limits = limits
        self._now = now
        self._throttles: LruMap[str, RefusalThrottle] = LruMap(max_addresses)

    def __len__(self) -> int:
        """How many addresses it holds."""
        return len(self._throttles)

    def wait_s(self, address: str) -> float:
        """How long the next refusal of an address has to wait."""
        throttle = self._throttles.get(address)
        if throttle is None:
            throttle = RefusalThrottle(self._limits, self._now)
            self._throttles.put(address, throttle)
        return throttle.wait_s()
