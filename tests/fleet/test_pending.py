"""Requests that are being prepared count where they are about to go: for the next choice they are there already."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from semel.fleet.fleet import Fleet
from semel.fleet.pending import PendingRequests
from semel.ledger import Holders
from tests.fleet.workers import several
from tests.wire.examples import digest_of
from tools.fleet.linear import Candidate, choose


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    """Two workers, which hold nothing and do nothing."""
    async with several(tmp_path) as rigs:
        yield Fleet([one.frontends[0].worker for one in rigs])


async def test_equal_new_items_of_one_moment_go_to_one_worker(fleet: Fleet) -> None:
    """Issue 8. Control: a choice that knows the load and not the item takes the other worker for the second."""
    with ExitStack() as stack:
        first, *others = [stack.enter_context(fleet.preparing([digest_of(1)])) for _ in range(4)]
    assert all(one is first for one in others)
    loads = [Candidate(one.name, int(one is first), 0) for one in fleet.workers]
    assert fleet.workers[choose(loads, [digest_of(1)])] is not first


async def test_a_burst_of_different_items_is_spread_before_any_is_sent(fleet: Fleet) -> None:
    """Control: by rank alone, as if nothing were under way, all of them go to one worker."""
    digests = [digest for digest in map(digest_of, range(60)) if fleet.choose([digest]) is fleet.workers[0]][:8]
    assert len(digests) == 8
    with ExitStack() as stack:
        chosen = Counter(stack.enter_context(fleet.preparing([digest])).name for digest in digests)
    assert sorted(chosen.values()) == [4, 4]


def test_what_was_sent_or_given_up_counts_no_more() -> None:
    """And is nowhere to be found. Control: what is still being prepared is."""
    holders = Holders()
    preparing = PendingRequests(holders, 2)
    with preparing.request([digest_of(1)]):
        with pytest.raises(ValueError, match="given up"), preparing.request([digest_of(1), digest_of(2)]):
            assert preparing.requests == 2
            raise ValueError("given up")
        assert preparing.requests == 1
        assert digest_of(1) in preparing
        assert digest_of(2) not in preparing
        assert (holders.get(digest_of(1)), holders.get(digest_of(2))) == (2, 0)
    assert preparing.requests == 0
    assert digest_of(1) not in preparing
    assert len(holders) == 0
