"""Shares of something that tenants use together: bytes, places, items. Pure.

Alone, a tenant may have all of it. While others have or want some, each of them is entitled to an equal share. Nothing
is kept in reserve. So when it is used up and a tenant wants no more than its share, some other tenant has more than
that, and has to yield: what it yields, and how, is for the owner of the thing to decide.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["Shares"]


class Shares:
    """How much of a capacity each tenant has. The sum never exceeds the capacity."""

    __slots__ = ("_amounts", "capacity", "total")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.total = 0
        """What all tenants have."""
        self._amounts: dict[str, int] = {}

    def __getitem__(self, tenant: str) -> int:
        """What a tenant has."""
        return self._amounts.get(tenant, 0)

    def __iter__(self) -> Iterator[str]:
        """The tenants that have some."""
        return iter(self._amounts)

    def __repr__(self) -> str:
        return f"Shares({self.total:,} of {self.capacity:,}, {len(self._amounts):,} tenants)"

    def fits(self, amount: int) -> bool:
        """Whether so much is free."""
        return self.total + amount <= self.capacity

    def share(self, tenant: str) -> int:
        """What a tenant is entitled to now: the capacity, divided by it and all others that have some."""
        others = len(self._amounts) - (tenant in self._amounts)
        return self.capacity // (others + 1)

    def debtor(self, tenant: str, amount: int) -> str | None:
        """Who has to yield, so that a tenant can have `amount` more: whoever has the most, if more than its share.

        None if it fits, or if the tenant itself would then have more than its share. In that case it has to wait.
        Looks at every tenant that has some; call it when there is no room.
        """
        if self.fits(amount) or self[tenant] + amount > self.share(tenant):
            return None
        return max((other for other in self._amounts if other != tenant), key=self._amounts.__getitem__, default=None)

    def add(self, tenant: str, amount: int) -> None:
        """A tenant has so much more, which has to fit."""
        assert self.fits(amount), "more than there is"
        if amount:
            self.total += amount
            self._amounts[tenant] = self[tenant] + amount

    def release(self, tenant: str, amount: int) -> None:
        """A tenant has so much less."""
        left = self[tenant] - amount
        assert left >= 0, "more than it has"
        self.total -= amount
        if left:
            self._amounts[tenant] = left
        else:
            self._amounts.pop(tenant, None)

    def change(self, tenant: str, by: int) -> None:
        """A tenant has so much more, or less."""
        if by >= 0:
            self.add(tenant, by)
        else:
            self.release(tenant, -by)
