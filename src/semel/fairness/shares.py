"""Shares of something that tenants use together: bytes, places, items (threats S21). Pure.

Alone, a tenant may have all of it. While others have or want some, each of them is entitled to an equal share. Nothing
is kept in reserve. So when it is used up and a tenant wants no more than its share, some other tenant has more than
that, and has to yield: what it yields, and how, is for the owner of the thing to decide.

With `Claims` it yields its newest claim first, because the least has been done for it. What has more than a share but
cannot be called back stays; then the tenant is refused, and nobody's claim is called back in vain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

__all__ = ["Claims", "Shares"]

_C = TypeVar("_C")


class Shares:
    """The amounts of a capacity that tenants have. The sum never exceeds the capacity."""

    __slots__ = ("_amounts", "capacity", "total")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.total = 0
        self._amounts: dict[str, int] = {}

    def __getitem__(self, tenant: str) -> int:
        """Return the amount that a tenant has."""
        return self._amounts.get(tenant, 0)

    def __iter__(self) -> Iterator[str]:
        """Yield the tenants that have some."""
        return iter(self._amounts)

    def __len__(self) -> int:
        """Count the tenants that have some."""
        return len(self._amounts)

    def __repr__(self) -> str:
        return f"Shares({self.total:,} of {self.capacity:,}, {len(self):,} tenants)"

    def fits(self, amount: int) -> bool:
        """Return whether so much is free."""
        return self.total + amount <= self.capacity

    def share(self, tenant: str) -> int:
        """Return what a tenant is entitled to now: the capacity, divided by it and all others that have some."""
        others = len(self._amounts) - (tenant in self._amounts)
        return self.capacity // (others + 1)

    def debtor(self, tenant: str, amount: int) -> str | None:
        """Return who has to yield, so that a tenant can have `amount` more: the one that has most, if over its share.

        None if it fits, or if the tenant itself would then have more than its share. In that case it has to wait.
        Looks at every tenant that has some; call it when there is no room.
        """
        if self.fits(amount) or self[tenant] + amount > self.share(tenant):
            return None
        return max((other for other in self._amounts if other != tenant), key=self._amounts.__getitem__, default=None)

    def change(self, tenant: str, by: int) -> None:
        """Change the amount of a tenant. It has to fit."""
        amount, total = self._amounts.get(tenant, 0) + by, self.total + by
        assert by <= 0 or total <= self.capacity, "more than there is"
        assert amount >= 0, "more than it has"
        self.total = total
        if amount:
            self._amounts[tenant] = amount
        else:
            self._amounts.pop(tenant, None)


class Claims(Generic[_C]):
    """The shares of tenants, and those of their claims that can be called back."""

    __slots__ = ("_revocable", "shares")

    def __init__(self, capacity: int) -> None:
        self.shares = Shares(capacity)
        self._revocable: dict[str, dict[_C, int]] = {}  # amounts by tenant and claim, in the order of their age

    def offer(self, tenant: str, claim: _C, amount: int) -> None:
        """Let a claim be called back, which has so much. With 0 it cannot be called back any more."""
        if amount:
            self._revocable.setdefault(tenant, {})[claim] = amount
        elif (claims := self._revocable.get(tenant)) is not None:
            claims.pop(claim, None)
            if not claims:
                del self._revocable[tenant]

    def to_revoke(self, tenant: str, amount: int) -> Sequence[_C] | None:
        """Return the claims to call back so that a tenant can have `amount` more; None if it cannot have it."""
        shares = self.shares
        if shares.fits(amount):
            return ()
        if shares.debtor(tenant, amount) is None:
            return None
        share = shares.share(tenant)
        amounts = {other: shares[other] for other in self._revocable if other != tenant}
        newest: dict[str, Iterator[tuple[_C, int]]] = {
            other: reversed(self._revocable[other].items()) for other in amounts
        }
        revoked: list[_C] = []
        missing = shares.total + amount - shares.capacity
        while missing > 0:
            debtor = max(amounts, key=amounts.__getitem__, default=None)
            if debtor is None or amounts[debtor] <= share:
                return None
            if (found := next(newest[debtor], None)) is None:
                del amounts[debtor]
                continue
            claim, its_amount = found
            revoked.append(claim)
            amounts[debtor] -= its_amount
            missing -= its_amount
        return revoked

    def __repr__(self) -> str:
        return f"Claims({self.shares!r}, {sum(map(len, self._revocable.values())):,} revocable)"
