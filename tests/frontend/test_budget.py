"""Bytes in flight, held against a model that only adds and subtracts (S18)."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from semel.errors import Busy, ConfigError, MediaTooLarge, TooManyBytes
from semel.frontend.budget import Account, Budget
from semel.frontend.limits import BudgetLimits
from tests.effort import examples

LIMITS = BudgetLimits(max_request_bytes=100, max_bytes=150, max_requests=3)


class Accounts(RuleBasedStateMachine):
    """Requests that come, take, let go and end in any order; the model is a dict of numbers."""

    accounts: Bundle[Account] = Bundle("accounts")
    pins: Bundle[tuple[Account, int, Callable[[], None]]] = Bundle("pins")

    @initialize()
    def begin(self) -> None:
        self.budget = Budget(LIMITS)
        self.held: dict[Account, int] = {}
        self.brought: dict[Account, int] = {}
        self.pinned: Counter[Account] = Counter()

    @rule(target=accounts)
    def open(self) -> Account | MultipleResults[Account]:
        if len(self.held) == LIMITS.max_requests:
            with pytest.raises(Busy, match="--max-waiting-requests"):
                self.budget.open()
            return multiple()
        account = self.budget.open()
        self.held[account] = self.brought[account] = 0
        return account

    @rule(account=accounts, nbytes=st.integers(0, 120))
    def take(self, account: Account, nbytes: int) -> None:
        if account not in self.held:  # it is closed
            account.take(nbytes)
        elif self.brought[account] + nbytes > LIMITS.max_request_bytes:
            with pytest.raises(MediaTooLarge, match="--max-request-media-bytes"):
                account.take(nbytes)
        elif self.total() + nbytes > LIMITS.max_bytes:
            with pytest.raises(TooManyBytes, match="--max-media-bytes-in-flight"):
                account.take(nbytes)
        else:
            account.take(nbytes)
            self.held[account] += nbytes
            self.brought[account] += nbytes

    @rule(account=accounts, nbytes=st.integers(0, 120))
    def keep(self, account: Account, nbytes: int) -> None:
        account.keep(nbytes)
        if account in self.held:
            self.held[account] = max(min(self.held[account], nbytes), self.pinned[account])

    @rule(account=accounts)
    def close(self, account: Account) -> None:
        account.close()
        self.held.pop(account, None)
        assert account.charged == self.pinned[account]

    @rule(target=pins, account=accounts, nbytes=st.integers(0, 120))
    def pin(self, account: Account, nbytes: int) -> tuple[Account, int, Callable[[], None]]:
        pinned = min(nbytes, self.held.get(account, self.pinned[account]) - self.pinned[account])
        self.pinned[account] += pinned
        return account, pinned, account.pin(nbytes)

    @rule(pin=consumes(pins))
    def unpin(self, pin: tuple[Account, int, Callable[[], None]]) -> None:
        account, nbytes, unpin = pin
        unpin()
        self.pinned[account] -= nbytes

    def total(self) -> int:
        return sum(self.held.values()) + sum(n for account, n in self.pinned.items() if account not in self.held)

    @invariant()
    def the_budget_holds_what_the_accounts_hold(self) -> None:
        if hasattr(self, "budget"):
            assert self.budget.in_flight == self.total() <= LIMITS.max_bytes
            assert self.budget.requests == len(self.held) <= LIMITS.max_requests
            assert all(account.charged == held for account, held in self.held.items())


Accounts.TestCase.settings = settings(max_examples=examples(200), stateful_step_count=40, deadline=None)
TestAccounts = Accounts.TestCase


def test_a_closed_account_takes_nothing_and_closing_twice_gives_back_once() -> None:
    budget = Budget(LIMITS)
    other = budget.open()
    other.take(10)
    with budget.open() as account:
        account.take(50)
    account.close()
    account.take(20)
    assert (budget.in_flight, budget.requests, account.charged) == (10, 1, 0)


def test_what_a_request_has_let_go_still_counts_as_brought() -> None:
    account = Budget(LIMITS).open()
    account.take(60)
    account.keep(0)
    with pytest.raises(MediaTooLarge, match="more than 100 bytes"):
        account.take(60)


def test_threads_that_take_at_the_same_time_lose_no_byte() -> None:
    budget = Budget(BudgetLimits(1 << 40, 1 << 40, 64))

    def work() -> None:
        for _ in range(200):
            with budget.open() as account:
                for _ in range(10):
                    account.take(7)
                account.keep(3)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert (budget.in_flight, budget.requests) == (0, 0)


@pytest.mark.parametrize(
    ("limits", "flag"),
    [
        ((0, 10, 1), "--max-request-media-bytes"),
        ((11, 10, 1), "--max-media-bytes-in-flight is 10, less than the 11"),
        ((10, 10, 0), "--max-waiting-requests"),
    ],
)
def test_limits_that_could_admit_nothing_are_refused_by_their_flag(limits: tuple[int, int, int], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        BudgetLimits(*limits)
