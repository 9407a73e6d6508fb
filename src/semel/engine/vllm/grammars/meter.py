"""Accounts of the CPU time that each tenant's grammars take in the engine core (threats S27). Pure: a clock is given.

While others use the engine, following may take a fifth of the wall time of each tenant: what it takes is a debt, which
is paid at that rate. Alone, a tenant may use what it likes.
"""

from __future__ import annotations

from typing import Final

from semel.fairness.recent_tenants import RecentTenants

__all__ = ["FollowingAccounts"]

_SHARE: Final = 0.2
_MAX_DEBT_NS: Final = 25_000_000
"""A tenant over it waits until it is paid."""

_CAPPED_DEBT_NS: Final = 1_000_000_000
"""More is forgotten: nobody waits longer than five seconds."""

_ABOUT_NS: Final = 10_000_000_000
_MAX_TENANTS: Final = 4_096


class FollowingAccounts:
    """The debts of tenants. Times are nanoseconds of one clock."""

    def __init__(self) -> None:
        self._debts: dict[str, tuple[float, int]] = {}
        self._tenants = RecentTenants(_ABOUT_NS)

    def see(self, tenant: str, now_ns: int) -> None:
        """Note that a tenant has a request."""
        self._tenants.see(tenant, now_ns)

    def charge(self, tenant: str, cpu_ns: int, now_ns: int) -> None:
        """Charge CPU time to a tenant."""
        if len(self._debts) >= _MAX_TENANTS:
            self._debts = {name: debt for name, debt in self._debts.items() if self.debt_ns(name, now_ns)}
        self._debts[tenant] = min(self.debt_ns(tenant, now_ns) + cpu_ns, _CAPPED_DEBT_NS), now_ns

    def debt_ns(self, tenant: str, now_ns: int) -> float:
        """Return what a tenant owes now."""
        debt_ns, at_ns = self._debts.get(tenant, (0.0, now_ns))
        return max(0.0, debt_ns - _SHARE * (now_ns - at_ns))

    def is_shared(self, tenant: str, now_ns: int) -> bool:
        """Return whether another tenant had a request within the last seconds."""
        return not self._tenants.is_alone(tenant, now_ns)

    def is_over(self, tenant: str, now_ns: int) -> bool:
        """Return whether a tenant owes too much, and others wait for it."""
        return self.debt_ns(tenant, now_ns) > _MAX_DEBT_NS and self.is_shared(tenant, now_ns)
