"""The rate limit of refusals and aborts: a burst is free, more come only at a limited rate (threats S18, S31).

A refusal is cheap, but a client that sends the next bad request right after each refusal could keep a frontend busy. A
delayed refusal costs nothing while it waits, and slows down its client. A client that leaves right after it has asked
gets no refusal, so its tenant's next request waits instead: if nobody is there any more after that, it costs next to
nothing. Pure: the clock is passed in.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from semel.core.lru import LruMap
from semel.fairness.recent_tenants import RecentTenants
from semel.frontend.limits import RefusalLimits

__all__ = ["AbortThrottle", "AddressThrottle", "RefusalLimits", "RefusalThrottle"]

_MAX_ADDRESSES: Final = 4_096
_MAX_ABORT_S: Final = 1.0
"""A client that waits longer than this does not send many."""


class RefusalThrottle:
    """Delays the refusals of one tenant."""

    __slots__ = ("_due", "_limits", "_now")

    def __init__(self, limits: RefusalLimits, now: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._now = now
        self._due = float("-inf")

    def wait_s(self) -> float:
        """Return how long the next refusal has to wait."""
        limits = self._limits
        if not limits.per_s:
            return 0.0
        now = self._now()
        earliest = now - limits.burst / limits.per_s
        self._due = min(max(self._due, earliest) + 1 / limits.per_s, now + limits.max_wait_s)
        return max(self._due - now, 0.0)

    def left_s(self) -> float:
        """Return how long the last refusal still has to wait."""
        return max(self._due - self._now(), 0.0)


class AbortThrottle:
    """Delays the requests of tenants that abort many of theirs, while other tenants are about (threats S31)."""

    def __init__(self, limits: Callable[[], RefusalLimits], now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self._limits = limits
        self._throttles: dict[str, RefusalThrottle] = {}
        """There are as many tenants as the operator has named."""

        self._tenants = RecentTenants()

    def wait_s(self, tenant: str) -> float:
        """Return how long a request of a tenant waits until it is admitted."""
        now = self.now()
        self._tenants.see(tenant, now)
        throttle = self._throttles.get(tenant)
        return 0.0 if throttle is None or self._tenants.is_alone(tenant, now) else throttle.left_s()

    def end(self, tenant: str, seconds: float) -> None:
        """A client has left a request of its tenant so long after it was admitted."""
        if seconds < _MAX_ABORT_S:
            if (throttle := self._throttles.get(tenant)) is None:
                throttle = self._throttles[tenant] = RefusalThrottle(self._limits(), self.now)
            throttle.wait_s()


class AddressThrottle:
    """Delays the refusals of requests without a valid key, by the address that they come from (threats S25).

    Only refusals ask it: a request with a valid key never waits, whatever others send from its address. Of more
    addresses than it can hold, it forgets those that were refused longest ago.
    """

    def __init__(
        self, limits: RefusalLimits, now: Callable[[], float] = time.monotonic, *, max_addresses: int = _MAX_ADDRESSES
    ) -> None:
        self._limits = limits
        self._now = now
        self._throttles: LruMap[str, RefusalThrottle] = LruMap(max_addresses)

    def __len__(self) -> int:
        """Return the number of addresses that it holds."""
        return len(self._throttles)

    def wait_s(self, address: str) -> float:
        """Return how long the next refusal of an address has to wait."""
        throttle = self._throttles.get(address)
        if throttle is None:
            throttle = RefusalThrottle(self._limits, self._now)
            self._throttles.put(address, throttle)
        return throttle.wait_s()
