"""Tenants that have asked lately: one of them may be alone. Pure: the time is passed in and must never go back."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["RecentTenants"]


class _Seen(NamedTuple):
    tenant: str
    at: float


class RecentTenants:
    """The tenant that asked last, and the last one before it: that is enough to know whether any is alone."""

    __slots__ = ("_last", "_other", "_within")

    def __init__(self, within: float = 600.0) -> None:
        """Expect a tenant to come back `within` so much time, in the unit of the clock."""
        self._within = within
        self._last: _Seen | None = None
        self._other: _Seen | None = None

    def see(self, tenant: str, now: float) -> None:
        """Note that a tenant asks."""
        if self._last is not None and self._last.tenant != tenant:
            self._other = self._last
        self._last = _Seen(tenant, now)

    def is_alone(self, tenant: str, now: float) -> bool:
        """Return whether no other tenant has asked lately."""
        other = self._other if self._last is not None and self._last.tenant == tenant else self._last
        return other is None or now - other.at > self._within
