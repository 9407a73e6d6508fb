"""`Retry-After`: what the error says, scattered."""

from __future__ import annotations

from random import Random

import pytest

from semel.errors import Busy, EngineFailed, InvalidRequest, NotReady, SemelError
from semel.frontend.budget import Budget
from semel.frontend.limits import BudgetLimits
from semel.frontend.middleware.concurrency import ConcurrencyLimits, RequestLimiter
from semel.web.errors import error_response


def told(error: SemelError, drawn: float = 0.0) -> str | None:
    return error_response(error, scatter=lambda: drawn).headers.get("Retry-After")


def test_it_is_told_with_what_may_be_sent_again_and_with_nothing_else() -> None:
    assert told(NotReady("x")) == "1"
    assert told(Busy("x", retry_after_s=12.4)) == "12"
    assert told(EngineFailed("x")) is None
    assert told(InvalidRequest("x")) is None


def test_clients_that_were_refused_together_do_not_come_back_together() -> None:
    """Control: without scattering all of them come in the same second."""
    random = Random(3)
    seconds = [
        int(error_response(Busy("x", retry_after_s=10.0), scatter=random.random).headers["Retry-After"])
        for _ in range(1_000)
    ]
    assert (min(seconds), max(seconds)) == (10, 20)
    assert max(seconds.count(second) for second in range(10, 21)) < 150
    assert {told(Busy("x", retry_after_s=10.0)) for _ in range(10)} == {"10"}


def test_a_gate_and_a_budget_tell_what_their_queues_say() -> None:
    """Control: the default of an error that knows no queue, which is 1 s for all of them."""
    gate = RequestLimiter(ConcurrencyLimits(max_requests=1, max_tenant_requests=1))
    budget = Budget(BudgetLimits(max_requests=1))
    gate.enter("a")
    with budget.open("a"):
        for refuse in (lambda: gate.enter("a"), lambda: gate.enter("b"), lambda: budget.open("a")):
            with pytest.raises(Busy) as refused:
                refuse()
            assert refused.value.retry_after_s == 1.0
        gate._retries._freed[0] -= 40  # nothing has become free since
        budget._retries._freed[0] -= 40
        for refuse in (lambda: gate.enter("a"), lambda: budget.open("a")):
            with pytest.raises(Busy) as refused:
                refuse()
            assert refused.value.retry_after_s > 25
