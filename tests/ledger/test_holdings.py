"""Holdings: whoever replays what it is told knows what is held, whenever it joined and whatever it knew before."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core import Digest, FeatureInfo, Layout
from semel.ledger import MAX_BATCH, Announcement, Holdings, holdings
from tests.ledger.examples import DIGESTS, HOLDINGS, digest_of

A, B = DIGESTS[:2]
PEERS = "xyz"

Known = dict[Digest, FeatureInfo]


class Replayed:
    """What a peer makes of what it is told."""

    def __init__(self) -> None:
        self.known: Known = {}
        self.number: int | None = None
        self.is_whole = False

    def replay(self, told: Announcement) -> None:
        if told.since is None:
            self.known.clear()
        else:
            assert told.since == self.number
        for digest in told.gone:
            self.known.pop(digest, None)
        self.known.update(told.holdings)
        self.number, self.is_whole = told.number, not told.more


changes = st.tuples(st.sampled_from(["hold", "drop"]), st.sampled_from(DIGESTS), st.just(""))
visits = st.tuples(st.sampled_from(["join", "leave", "slice", "tell"]), st.just(A), st.sampled_from(PEERS))


class Rig:
    """Holdings beside an obvious model of them, and peers."""

    def __init__(self, held: Holdings[str]) -> None:
        self.held = held
        self.model: Known = {}
        self.peers = {peer: Replayed() for peer in PEERS}
        self.here: set[str] = set()

    def step(self, kind: str, digest: Digest, peer: str) -> None:
        if kind == "hold":
            self.held.hold(digest, HOLDINGS[digest])
            self.model[digest] = HOLDINGS[digest]
        elif kind == "drop":
            self.held.drop(digest)
            self.model.pop(digest, None)
        elif kind == "join":
            self.here.add(peer)
            self.replay(peer, self.held.join(peer, self.peers[peer].number if self.peers[peer].is_whole else None))
        elif kind == "leave":
            self.held.leave(peer)
            self.here.discard(peer)
        elif peer in self.here:
            self.replay(peer, self.held.changes(peer) if kind == "tell" else [])
            self.slice(peer, 1 if kind == "slice" else 0)
        self.check()

    def slice(self, peer: str, most: int) -> None:
        while most and (told := self.held.next_slice(peer)) is not None:
            self.replay(peer, [told])
            most -= 1

    def replay(self, peer: str, told: list[Announcement]) -> None:
        for one in told:
            self.peers[peer].replay(one)

    def check(self) -> None:
        assert {d for d in DIGESTS if d in self.held} == self.model.keys()
        expected = len(self.model), sum(info.nbytes for info in self.model.values())
        assert (len(self.held), self.held.nbytes) == expected

    def drain(self) -> None:
        for peer in self.here:
            self.slice(peer, len(DIGESTS))
            self.replay(peer, self.held.changes(peer))
            assert self.peers[peer].is_whole
            assert self.peers[peer].known == self.model
            assert self.held.changes(peer) == []


def check(steps: list[tuple[str, Digest, str]], held: Holdings[str]) -> None:
    """Slices of two items, in any order with changes; peers that come back say what they know."""
    rig = Rig(held)
    for step in steps:
        rig.step(*step)
    rig.drain()


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "batched" not in request.node.name:
        monkeypatch.setattr(holdings, "MAX_BATCH", 2)


@given(st.lists(st.one_of(changes, visits), max_size=60), st.sampled_from([1, 3, 65_536]))
def test_every_peer_that_replays_its_announcements_knows_what_is_held_D2(
    steps: list[tuple[str, Digest, str]], max_log: int
) -> None:
    check(steps, Holdings(max_log=max_log))


class Hasty(Holdings[str]):
    """Takes for known what is behind the end of its log."""

    def number_changes(self) -> None:
        super().number_changes()
        self._floor = 0


def test_mutant_a_log_that_forgets_and_does_not_know_it_is_found_D2() -> None:
    steps = [("join", A, "x"), ("leave", A, "x"), ("hold", A, ""), ("hold", B, ""), ("join", A, "x")]
    check(steps, Holdings(max_log=1))
    with pytest.raises(AssertionError):
        check(steps, Hasty(max_log=1))


class Unnumbered(Holdings[str]):
    """Takes a slice of what has no number yet."""

    def next_slice(self, peer: str) -> Announcement | None:
        before, self._before = self._before, {}
        told = super().next_slice(peer)
        self._before = before
        return told


def test_mutant_a_slice_with_what_has_no_number_yet_is_found_D2() -> None:
    """What is gone again before it gets one is not told of."""
    third = DIGESTS[2]
    steps = [*(("hold", digest, "") for digest in (A, B, third)), ("join", A, "x"), ("drop", third, "")]
    steps += [("tell", A, "x"), ("hold", third, ""), ("slice", A, "x"), ("drop", third, "")]
    check(steps, Holdings())
    with pytest.raises(AssertionError):
        check(steps, Unnumbered())


def test_only_net_changes_are_told_what_is_gone_first_D2() -> None:
    held: Holdings[str] = Holdings()
    held.hold(A, HOLDINGS[A])
    assert held.join("x") == [Announcement(None, 1, holdings={A: HOLDINGS[A]})]
    held.drop(A)
    held.hold(A, HOLDINGS[A])
    held.hold(B, HOLDINGS[B])
    held.drop(B)
    assert held.changes("x") == []
    held.hold(B, HOLDINGS[B])
    held.drop(A)
    assert held.changes("x") == [Announcement(1, 2, (A,), {B: HOLDINGS[B]})]


def test_peers_that_know_as_much_are_told_the_same_D2() -> None:
    held: Holdings[str] = Holdings()
    for peer in PEERS:
        held.join(peer)
    held.hold(A, HOLDINGS[A])
    assert held.changes("x") == [Announcement(0, 1, holdings={A: HOLDINGS[A]})]
    held.hold(B, HOLDINGS[B])
    assert held.known("y") == held.known("z") != held.known("x")
    assert held.catch_up(["y", "z"]) == [Announcement(0, 2, holdings={A: HOLDINGS[A], B: HOLDINGS[B]})]
    assert held.changes("z") == []
    assert held.changes("x") == [Announcement(1, 2, holdings={B: HOLDINGS[B]})]


def test_who_comes_back_is_told_what_has_changed_meanwhile_D2() -> None:
    """Control: who was away for longer than the log goes back, and is told everything."""
    for max_log, told in ((65_536, Announcement(1, 2, (A,), {B: HOLDINGS[B]})), (1, None)):
        held: Holdings[str] = Holdings(max_log=max_log)
        held.hold(A, HOLDINGS[A])
        held.join("x")
        held.leave("x")
        held.drop(A)
        held.hold(B, HOLDINGS[B])
        assert held.join("x", 1) == [told or Announcement(None, 2, holdings={B: HOLDINGS[B]})]
        held.leave("x")
        assert held.join("x", 2) == [Announcement(2, 2)], "nothing is new, and it hears that"
        assert held.join("y", 99)[0].since is None, "nobody knows what has not happened"


def test_a_holding_that_changed_is_told_again_D2() -> None:
    held: Holdings[str] = Holdings()
    held.hold(A, HOLDINGS[A])
    held.join("x")
    held.hold(A, other := FeatureInfo("image", 5, Layout((1,))))
    assert held.nbytes == 5
    assert held.changes("x") == [Announcement(1, 2, holdings={A: other})]


def test_announcements_are_batched_D2() -> None:
    held: Holdings[str] = Holdings()
    held.join("x")
    digests = [digest_of(n) for n in range(2 * MAX_BATCH + 1)]
    for digest in digests:
        held.hold(digest, HOLDINGS[A])
    told = held.changes("x")
    assert [(one.since, one.number, len(one.holdings)) for one in told] == [(0, 0, 256), (0, 0, 256), (0, 1, 1)]
    slices = [*held.join("y"), *iter(lambda: held.next_slice("y"), None)]
    assert [(one.since, one.number, len(one.holdings), one.more) for one in slices] == [
        (None, 1, 256, True),
        (1, 1, 256, True),
        (1, 1, 1, False),
    ]
    for digest in digests:
        held.drop(digest)
    assert [(one.number, len(one.gone)) for one in held.changes("x")] == [(1, 256), (1, 256), (2, 1)]


def test_what_is_remembered_of_changes_is_bounded_D2() -> None:
    held: Holdings[str] = Holdings(max_log=10)
    for n in range(100):
        held.hold(digest_of(n), HOLDINGS[A])
        held.drop(digest_of(n))
        held.hold(digest_of(n), HOLDINGS[A])
    assert len(held._log) + len(held._before) <= 21
