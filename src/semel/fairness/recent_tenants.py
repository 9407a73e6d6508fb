"""Tenants that have asked lately: whether one of them is alone. Pure, the time is passed in and must never go back."""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["RecentTenants"]

_RECENT_S: Final = 600.0


class _Seen(NamedTuple):
    tenant: str
    at_s: float


class RecentTenants:
    """The tenant that asked last, and the last one before it: that is enough to know whether any is alone."""

    __slots__ = ("_last", "_other")

    def __init__(self) -> None:
        self._last: _Seen | None = None
        self._other: _Seen | None = None

    def see(self, tenant: str, now: float) -> None:
        """A tenant asks."""
        if self._last is not None and self._last.tenant != tenant:
            self._other = self._last
        self._last = _Seen(tenant, now)

    def is_alone(self, tenant: str, now: float) -> bool:
        """Whether no other tenant has asked within 10 minutes."""
        other = self._other if self._last is not None and self._last.tenant == tenant else self._last
        return other is None or now - other.at_s > _RECENT_S
