"""CacheUpdates: whom it reaches when, and how often. (What frontends make of it: `tests/ledger/test_machine`.)"""

from __future__ import annotations

from math import inf

import pytest

from semel.worker import cache_updates as updates_module
from semel.worker.cache_updates import CacheUpdates, Load
from tests.ledger.examples import DIGESTS, HOLDINGS, digest_of

INFO = HOLDINGS[DIGESTS[0]]


def messages_in_10_s(updates: CacheUpdates[int], peers: int) -> int:
    """10 requests a second, of which 4 show something new, and as much is evicted."""
    sent = 0
    for peer in range(peers):
        updates.join(peer)
    for tenth in range(100):
        now = tenth / 10
        updates.set_load(Load(tenth % 7), now)
        if tenth % 5 < 2:
            updates.hold(digest_of(tenth), INFO, now)
            updates.drop(digest_of(max(0, tenth - 50)), now)
        sent += len(updates.concerning(tenth % peers))
        while updates.due < now + 0.1:
            sent += sum(len(one.peers) for one in updates.next_turn(updates.due))
    return sent


def test_100_frontends_and_10_requests_a_second_make_at_most_450_messages_a_second() -> None:
    """Control: as with a few frontends."""
    assert messages_in_10_s(CacheUpdates(), 100) <= 4_500
    assert messages_in_10_s(CacheUpdates(announce_interval_s=0.02), 100) > 9_000


def test_a_few_frontends_are_told_within_20_ms_and_many_within_the_announce_interval() -> None:
    for peers, within_s in ((4, 0.02), (5, 0.25)):
        updates: CacheUpdates[int] = CacheUpdates()
        for peer in range(peers):
            updates.join(peer)
        updates.set_load(Load(1), 10.0)
        assert updates.due == pytest.approx(10.005)
        told = []
        while updates.due < inf:
            told += updates.next_turn(10.005)
        assert sorted(peer for one in told for peer in one.peers) == list(range(peers))
        assert all(one.load == Load(1) for one in told)
        updates.set_load(Load(2), 10.006)
        assert updates.due == pytest.approx(10.005 + within_s)


def test_an_only_frontend_is_told_no_load_but_a_lower_one_than_it_was_told_and_a_second_one_gets_the_sum_at_once() -> (
    None
):
    """Control: with two frontends each change is told, as it was to one."""
    updates: CacheUpdates[int] = CacheUpdates()
    updates.join(1)
    for load in (1, 2, 1, 0, 1):
        updates.set_load(Load(load), 1.0)
        assert updates.due == inf
    updates.set_load(Load(2), 1.0)
    (first,) = updates.join(2)
    assert first.load == Load(2)
    updates.set_load(Load(2, 1), 2.0)
    (both,) = updates.next_turn(updates.due)
    assert (both.peers, both.load) == ((1, 2), Load(2, 1))
    updates.leave(2)
    updates.set_load(Load(3, 1), 3.0)
    assert updates.due < inf
    (rest,) = updates.next_turn(updates.due)
    assert (rest.peers, rest.load) == ((1,), Load(3, 1)), "it is higher, but none of it is the other's any more"
    updates.set_load(Load(4, 1), 4.0)
    updates.leave(2)
    assert updates.due == inf
    updates.set_load(Load(1), 4.0)
    assert updates.due < inf
    (rest,) = updates.next_turn(updates.due)
    assert (rest.peers, rest.load) == ((1,), Load(1)), "those of the one that has left are gone"
    updates.hold(digest_of(1), INFO, 4.0)
    (items,) = updates.concerning(1)
    assert items.load == Load(1)


def test_frontends_that_know_as_much_get_one_message_and_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates_module, "_PEERS_PER_TURN", 100)
    updates: CacheUpdates[int] = CacheUpdates()
    for peer in range(250):
        updates.join(peer)
    updates.hold(digest_of(1), INFO, 1.0)
    (first,) = updates.concerning(7)
    turns = []
    while updates.due < inf:
        turns.append(updates.next_turn(1.1))
    assert [[len(one.peers) for one in turn] for turn in turns] == [[99], [100], [50]]
    assert first.peers == (7,)
    assert all(one.announcement == first.announcement for turn in turns for one in turn)
