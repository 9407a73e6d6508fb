"""S22: a worker that fails looks idle, and draws requests. In processes and over real sockets: what clients see of it.

`scripts/failing-worker` shows the same for 60 s, with 3, 6 and 10 workers. What a client may not bring about by its own
requests stands in tests/fleet/test_worker_faults.py.
"""

from __future__ import annotations

import pytest

from tools.fleet.failing import Trial, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


async def test_failures_before_the_first_token_reach_at_most_one_client_in_a_hundred() -> None:
    """Control: as it was before, a third of all clients and more: the worker that fails looked idle."""
    seen = await run(Trial(3, 20.0, "first_token", "shipped", 12.0))
    before = await run(Trial(3, 20.0, "first_token", "before", 6.0))
    assert seen.errors <= 0.01 * seen.requests
    assert seen.ejections >= 1
    assert before.errors >= 0.2 * before.requests


async def test_failures_of_streams_that_have_begun_reach_at_most_five_clients() -> None:
    """Nobody can take back what was sent, so only ejection helps. Control: without anything, far more of them."""
    seen = await run(Trial(3, 20.0, "second_token", "shipped", 12.0))
    before = await run(Trial(3, 20.0, "second_token", "before", 6.0))
    assert seen.errors <= 5
    assert before.errors >= 0.2 * before.requests
