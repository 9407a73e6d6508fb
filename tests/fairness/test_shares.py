"""Shares of tenants, against a model that looks at everything (threats S21)."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.fairness.shares import Shares

TENANTS = ("a", "b", "c", "d")
CAPACITY = 24

steps = st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(-CAPACITY, CAPACITY)), max_size=60)


class Greedy(Shares):
    """The wrong implementation: first come, first served."""

    def debtor(self, *_: object) -> str | None:
        return None


def play(shares: Shares, moves: list[tuple[str, int]]) -> dict[str, int]:
    """Take and release at random; whoever has to yield does so at once. Checks every step against the model."""
    amounts = dict.fromkeys(TENANTS, 0)
    for tenant, amount in moves:
        if amount < 0:
            amount = min(-amount, amounts[tenant])
            shares.change(tenant, -amount)
            amounts[tenant] -= amount
            continue
        asking = [other for other in TENANTS if amounts[other] or other == tenant]
        entitled = Fraction(CAPACITY, len(asking)) >= amounts[tenant] + amount
        while (debtor := shares.debtor(tenant, amount)) is not None:
            assert debtor != tenant
            assert amounts[debtor] * len(asking) > CAPACITY  # it has more than its share
            shares.change(debtor, -1)
            amounts[debtor] -= 1
        if shares.fits(amount):
            shares.change(tenant, amount)
            amounts[tenant] += amount
        else:
            assert not entitled, "a tenant within its share was refused"
        assert {other: shares[other] for other in TENANTS} == amounts
        assert shares.total == sum(amounts.values()) <= CAPACITY
    return amounts


@given(steps)
def test_nobody_within_its_share_is_refused_and_nobody_within_it_yields_S21(moves: list[tuple[str, int]]) -> None:
    play(Shares(CAPACITY), moves)


def test_alone_a_tenant_has_everything_and_yields_down_to_its_share() -> None:
    shares = Shares(CAPACITY)
    assert play(shares, [("a", CAPACITY), ("b", 12)]) == {"a": 12, "b": 12, "c": 0, "d": 0}
    assert shares.debtor("b", 1) is None  # it would have more than its share
    assert shares.share("c") == 8


def test_first_come_first_served_is_noticed_as_a_mutant() -> None:
    with pytest.raises(AssertionError, match="within its share was refused"):
        play(Greedy(CAPACITY), [("a", CAPACITY), ("b", 12)])
