"""Holdings: whoever replays what it is told knows what is held, whenever it joined."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from semel.core import Digest, FeatureInfo, Layout
from semel.ledger import MAX_BATCH, Announcement, Gone, Have, Holdings
from tests.ledger.examples import DIGESTS, HOLDINGS, digest_of

A, B = DIGESTS[:2]
PEERS = "xyz"


def replay(known: dict[Digest, FeatureInfo], announcement: Announcement) -> None:
    if isinstance(announcement, Have):
        known.update(announcement.holdings)
    else:
        for digest in announcement.digests:
            del known[digest]


changes = st.tuples(st.sampled_from(["hold", "drop"]), st.sampled_from(DIGESTS), st.just(""))
visits = st.tuples(st.sampled_from(["join", "leave"]), st.just(A), st.sampled_from(PEERS))
flushes = st.just(("flush", A, ""))


@given(st.lists(st.one_of(changes, visits, flushes), max_size=60))
def test_every_peer_that_replays_its_announcements_knows_what_is_held_D2(steps: list[tuple[str, Digest, str]]) -> None:
    holdings: Holdings[str] = Holdings()
    held: set[Digest] = set()
    known: dict[str, dict[Digest, FeatureInfo]] = {}
    numbers: dict[str, int] = {}
    for kind, digest, peer in [*steps, ("flush", A, "")]:
        if kind == "hold":
            holdings.hold(digest, HOLDINGS[digest])
            held.add(digest)
        elif kind == "drop":
            holdings.drop(digest)
            held.discard(digest)
        elif kind == "join":
            holdings.join(peer)
            known[peer], numbers[peer] = {}, 0
        elif kind == "leave":
            holdings.leave(peer)
            known.pop(peer, None)
        else:
            for told, announcement in holdings.announcements():
                assert announcement.number == numbers[told]
                numbers[told] += 1
                replay(known[told], announcement)
            assert all(what == {d: HOLDINGS[d] for d in held} for what in known.values())
            assert holdings.announcements() == []
        assert {d for d in DIGESTS if d in holdings} == held
        assert (len(holdings), holdings.nbytes) == (len(held), sum(HOLDINGS[d].nbytes for d in held))


def test_only_net_changes_are_told_what_is_gone_first_D2() -> None:
    holdings: Holdings[str] = Holdings()
    holdings.hold(A, HOLDINGS[A])
    holdings.join("x")
    assert holdings.announcements() == [("x", Have(0, {A: HOLDINGS[A]}))]
    holdings.drop(A)
    holdings.hold(A, HOLDINGS[A])
    holdings.hold(B, HOLDINGS[B])
    holdings.drop(B)
    assert holdings.announcements() == []
    holdings.hold(B, HOLDINGS[B])
    holdings.drop(A)
    assert holdings.announcements() == [("x", Gone(1, (A,))), ("x", Have(2, {B: HOLDINGS[B]}))]


def test_a_new_peer_is_told_everything_and_the_others_only_what_is_new_D2() -> None:
    holdings: Holdings[str] = Holdings()
    holdings.join("x")
    holdings.hold(A, HOLDINGS[A])
    holdings.announcements()
    holdings.hold(B, HOLDINGS[B])
    holdings.join("y")
    assert holdings.announcements() == [
        ("x", Have(1, {B: HOLDINGS[B]})),
        ("y", Have(0, {A: HOLDINGS[A], B: HOLDINGS[B]})),
    ]


def test_a_holding_that_changed_is_told_again_D2() -> None:
    holdings: Holdings[str] = Holdings()
    holdings.hold(A, HOLDINGS[A])
    holdings.join("x")
    holdings.announcements()
    holdings.hold(A, other := FeatureInfo("image", 5, Layout((1,))))
    assert (holdings.get(A), holdings.nbytes) == (other, 5)
    assert holdings.announcements() == [("x", Have(1, {A: other}))]


def test_announcements_are_batched_D2() -> None:
    holdings: Holdings[str] = Holdings()
    holdings.join("x")
    digests = [digest_of(n) for n in range(2 * MAX_BATCH + 1)]
    for digest in digests:
        holdings.hold(digest, HOLDINGS[A])
    haves = [told for _, told in holdings.announcements() if isinstance(told, Have)]
    assert [len(told.holdings) for told in haves] == [MAX_BATCH, MAX_BATCH, 1]
    for digest in digests:
        holdings.drop(digest)
    gones = [told for _, told in holdings.announcements() if isinstance(told, Gone)]
    assert [(told.number, len(told.digests)) for told in gones] == [(3, MAX_BATCH), (4, MAX_BATCH), (5, 1)]


def test_with_nobody_to_tell_no_change_is_remembered_D2() -> None:
    holdings: Holdings[str] = Holdings()
    for n in range(10):
        holdings.hold(digest_of(n), HOLDINGS[A])
        holdings.drop(digest_of(n))
    assert not holdings._before
