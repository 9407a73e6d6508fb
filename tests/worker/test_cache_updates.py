"""Cache updates: a frontend that replays them knows what is held and how busy the worker is, soon, and cheaply."""

from __future__ import annotations

from collections import Counter
from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core import Digest, FeatureInfo
from semel.errors import ProtocolError
from semel.ledger import Announcement, Holdings, Ledger, holdings
from semel.worker import cache_updates as updates_module
from semel.worker.cache_updates import CacheUpdates, Load, StateDelta
from tests.ledger.examples import DIGESTS, HOLDINGS, digest_of

PEERS = tuple(range(8))
INFO = HOLDINGS[DIGESTS[0]]


class Frontends:
    """Frontends that hear a worker's cache updates, with the ledgers that they really have."""

    def __init__(self, updates: CacheUpdates[int]) -> None:
        self.updates = updates
        self.now = 0.0
        self.held: dict[Digest, FeatureInfo] = {}
        self.load = Load()
        self.ledgers = {peer: Ledger() for peer in PEERS}
        self.loads: dict[int, Load] = {}
        """Of those that are connected."""

        self.told: Counter[int] = Counter()

    def connect(self, peer: int) -> None:
        if peer not in self.loads:
            resume = self.ledgers[peer].resume
            self.ledgers[peer].open(b"one")
            self.hear(self.updates.join(peer, None if resume is None else resume[1]))

    def lose(self, peer: int) -> None:
        if self.loads.pop(peer, None) is not None:
            self.updates.leave(peer)
            self.ledgers[peer].close()

    def hear(self, deltas: list[StateDelta[int]]) -> None:
        for delta in deltas:
            for peer in delta.peers:
                self.ledgers[peer].announce(delta.announcement)
                self.loads[peer] = delta.load
                self.told[peer] += 1

    def change(self, digest: Digest, *, is_held: bool) -> None:
        if is_held:
            self.held[digest] = INFO
            self.updates.hold(digest, INFO, self.now)
        else:
            self.held.pop(digest, None)
            self.updates.drop(digest, self.now)

    def set_load(self, number: int) -> None:
        self.load = Load(number)
        self.updates.set_load(self.load, self.now)

    def ask(self, peer: int, digest: Digest) -> None:
        """A request of one of them is taken: it knows what became of its item before it hears that."""
        if peer in self.loads:
            self.change(digest, is_held=True)
            self.hear(self.updates.concerning(peer))
            assert self.ledgers[peer].knows(digest)

    def slice(self, peer: int) -> bool:
        delta = self.updates.next_slice(peer)
        self.hear([] if delta is None else [delta])
        return delta is not None

    def pass_time(self, until: float) -> None:
        while self.updates.due <= until:
            self.now = max(self.now, self.updates.due)
            self.hear(self.updates.next_turn(self.now))
        self.now = until

    def check_after_quiet(self) -> None:
        for peer in self.loads:
            while self.slice(peer):
                pass
        self.pass_time(self.now + 1.0)
        assert self.updates.due == inf, "nobody is told what has not changed"
        for peer, load in self.loads.items():
            assert load == self.load
            assert {digest for digest in DIGESTS if self.ledgers[peer].knows(digest)} == self.held.keys()


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdings, "MAX_BATCH", 2)
    monkeypatch.setattr(updates_module, "_PEERS_PER_TURN", 3)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["connect", "lose", "hold", "drop", "load", "ask", "slice", "wait"]),
        st.sampled_from(PEERS),
        st.sampled_from(DIGESTS),
        st.sampled_from([0.001, 0.01, 0.3]),
    ),
    max_size=60,
)


def walk(steps: list[tuple[str, int, Digest, float]], updates: CacheUpdates[int]) -> None:
    frontends = Frontends(updates)
    for kind, peer, digest, seconds in steps:
        match kind:
            case "connect":
                frontends.connect(peer)
            case "lose":
                frontends.lose(peer)
            case "hold" | "drop":
                frontends.change(digest, is_held=kind == "hold")
            case "load":
                frontends.set_load(peer)
            case "ask":
                frontends.ask(peer, digest)
            case "slice":
                frontends.slice(peer)
            case _:
                frontends.pass_time(frontends.now + seconds)
    frontends.check_after_quiet()


@given(STEPS, st.sampled_from([1, 3, 65_536]))
def test_after_quiet_every_frontend_knows_what_is_held_and_how_busy_it_is_D2(
    steps: list[tuple[str, int, Digest, float]], max_log: int
) -> None:
    walk(steps, CacheUpdates(holdings=Holdings(max_log=max_log)))


class Unannounced(Holdings[int]):
    """Says nothing of what is gone."""

    def _since(self, known: int, *, more: bool) -> list[Announcement]:
        return [Announcement(known, self.number, holdings=one.holdings) for one in super()._since(known, more=more)]


class Skipping(Holdings[int]):
    """Takes who comes back for one who knows everything, and says so."""

    def join(self, peer: int, known: int | None = None) -> list[Announcement]:
        told = super().join(peer, known)
        return told if known is None else [Announcement(known, self.number)]


class Unconcerned(CacheUpdates[int]):
    """Lets everybody wait for the next round."""

    def concerning(self, _: int) -> list[StateDelta[int]]:
        return []


@pytest.mark.parametrize(
    "kind",
    [lambda: CacheUpdates(holdings=Unannounced()), lambda: CacheUpdates(holdings=Skipping()), Unconcerned],
    ids=["gone is not announced", "a resume skips a change", "the asker is not told"],
)
def test_mutants_are_found_D2(kind: type[CacheUpdates[int]]) -> None:
    random = Random(1)
    kinds = ["connect", "lose", "hold", "drop", "load", "ask", "slice", "wait"]
    with pytest.raises((AssertionError, ProtocolError)):
        for _ in range(300):
            steps = [
                (random.choice(kinds), random.choice(PEERS), random.choice(DIGESTS), random.choice([0.001, 0.3]))
                for _ in range(40)
            ]
            walk(steps, kind())


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
        while updates.due < inf:
            updates.next_turn(10.005)
        updates.set_load(Load(2), 10.006)
        assert updates.due == pytest.approx(10.005 + within_s)


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
