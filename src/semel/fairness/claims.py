"""Claims on what tenants share, and which of them are called back for the sake of others. Pure (threats S21).

A tenant that wants no more than its share gets it. If there is no room, whoever has more than a share yields: its
newest claim first, because the least has been done for it. What has more than a share but cannot be called back stays;
then the tenant is refused, and nobody's claim is called back in vain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from semel.fairness.shares import Shares

__all__ = ["Claims"]

_C = TypeVar("_C")


class Claims(Generic[_C]):
    """The shares of tenants, and those of their claims that can be called back."""

    __slots__ = ("_revocable", "shares")

    def __init__(self, capacity: int) -> None:
        self.shares = Shares(capacity)
        self._revocable: dict[str, dict[_C, int]] = {}
        """By tenant: the claims that can be called back, in the order of their age, and what each has."""

    def offer(self, tenant: str, claim: _C, amount: int) -> None:
        """Let a claim be called back, which has so much. With 0 it cannot be called back any more."""
        if amount:
            self._revocable.setdefault(tenant, {})[claim] = amount
        elif (claims := self._revocable.get(tenant)) is not None:
            claims.pop(claim, None)
            if not claims:
                del self._revocable[tenant]

    def to_revoke(self, tenant: str, amount: int) -> Sequence[_C] | None:
        """The claims that have to be called back so that a tenant can have `amount` more; None if it cannot have it."""
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
