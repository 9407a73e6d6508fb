"""The intake: a feature is kept as long as a request uses it, and a request waits for what will come."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from semel.core import Digest
from semel.errors import EngineFailed, ProtocolError
from semel.ledger import Intake, Opened
from tests.ledger.examples import DIGESTS, FEATURES, feature_of

A, B, C = DIGESTS[:3]
READY = Opened((), is_ready=True)


class Rig:
    """An intake with one frontend, unless another is named, and an engine that holds `held`."""

    def __init__(self) -> None:
        self.intake: Intake[str] = Intake()
        self.held: set[Digest] = set()

    def open(self, request: str, digests: Iterable[Digest], payloads: Iterable[Digest] = (), peer: str = "x") -> Opened:
        return self.intake.open(peer, request, digests, payloads, self.held.__contains__)

    def arrive(self, digest: Digest, peer: str = "x") -> list[str]:
        return self.intake.arrive(peer, digest, FEATURES[digest])

    def features(self, request: str, peer: str = "x") -> set[Digest]:
        return set(self.intake.features(peer, request))

    def is_empty(self) -> bool:
        return (len(self.intake), self.intake.nbytes, self.intake._sessions, self.intake._at_hand) == (0, 0, {}, {})


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_request_waits_for_its_payloads_D1(rig: Rig) -> None:
    assert rig.open("r", [A, B, A], [A, B]) == Opened((), is_ready=False)
    assert (rig.arrive(A), rig.intake.is_ready("x", "r"), rig.intake.waiting) == ([], False, 1)
    assert (rig.arrive(B), rig.intake.is_ready("x", "r"), rig.intake.waiting) == (["r"], True, 0)
    assert rig.features("r") == {A, B}
    assert rig.intake.nbytes == FEATURES[A].nbytes + FEATURES[B].nbytes
    assert rig.intake.close("x", "r")
    assert rig.is_empty()
    assert not rig.intake.close("x", "r")
    assert not rig.intake.is_ready("x", "r")


def test_what_the_engine_holds_is_not_waited_for_D1(rig: Rig) -> None:
    rig.held = {A}
    assert rig.open("r", [A]) == READY
    assert rig.features("r") == set()


def test_a_request_without_items_is_ready(rig: Rig) -> None:
    assert rig.open("r", []) == READY


def test_what_nobody_holds_or_sends_has_to_be_asked_for_D3(rig: Rig) -> None:
    rig.held = {A}
    assert rig.open("r", [B, A, C, B]) == Opened((B, C), is_ready=False)
    assert rig.arrive(C) == []
    assert rig.arrive(B) == ["r"]


def test_what_another_request_has_at_hand_is_used_whoever_sent_it_D1(rig: Rig) -> None:
    rig.open("r", [A], [A])
    rig.arrive(A)
    assert rig.open("s", [A]) == READY
    assert rig.open("s", [A], peer="y") == READY
    assert rig.intake.nbytes == FEATURES[A].nbytes
    rig.intake.close("x", "r")
    rig.intake.close("x", "s")
    assert rig.features("s", "y") == {A}
    rig.intake.forget("y")
    assert rig.is_empty()


def test_a_feature_that_comes_from_two_frontends_is_kept_once_D1(rig: Rig) -> None:
    rig.open("r", [A], [A])
    rig.open("r", [A], [A], peer="y")
    rig.arrive(A)
    assert rig.intake.arrive("y", A, feature_of(A)) == ["r"]
    assert rig.intake.features("x", "r")[A] is rig.intake.features("y", "r")[A]
    assert rig.intake.nbytes == FEATURES[A].nbytes


def test_what_another_request_of_the_session_promised_is_waited_for_D1(rig: Rig) -> None:
    rig.open("r", [A], [A])
    assert rig.open("s", [A]) == Opened((), is_ready=False)
    assert rig.open("s", [A], peer="y") == Opened((A,), is_ready=False)
    assert rig.arrive(A) == ["r", "s"]
    assert not rig.intake.is_ready("y", "s")


def test_a_promise_outlives_its_request_while_another_waits_D3(rig: Rig) -> None:
    rig.open("r", [A], [A])
    rig.open("s", [A])
    rig.intake.close("x", "r")
    assert rig.open("t", [A]) == Opened((), is_ready=False)
    rig.intake.close("x", "s")
    assert rig.arrive(A) == ["t"]


def test_a_promise_ends_when_nobody_waits_for_it_D3(rig: Rig) -> None:
    rig.open("r", [A], [A])
    rig.open("other", [B], [B])
    rig.intake.close("x", "r")
    assert rig.arrive(A) == []
    assert rig.open("s", [A]) == Opened((A,), is_ready=False)


def test_what_another_request_has_asked_for_is_no_promise_D3(rig: Rig) -> None:
    assert rig.open("r", [A]).needed == (A,)
    assert rig.open("s", [A]).needed == (A,)
    rig.intake.close("x", "r")
    assert rig.arrive(A) == ["s"]


def test_a_feature_that_nobody_waits_for_is_dropped_D3(rig: Rig) -> None:
    assert rig.arrive(A) == []
    rig.open("r", [A], [A])
    assert rig.arrive(A) == ["r"]
    assert rig.arrive(A) == []
    rig.intake.close("x", "r")
    assert rig.is_empty()


def test_what_the_engine_misses_is_used_awaited_or_asked_for_D3(rig: Rig) -> None:
    rig.held = {A, B, C}
    rig.open("r", [A, B, C])
    rig.open("has", [A], [A])
    rig.arrive(A)
    rig.open("awaits", [B], [B])
    assert rig.intake.missing("x", "r", [C, B, A]) == (C,)
    assert rig.features("r") == {A}
    assert rig.arrive(B) == ["awaits"]
    assert rig.arrive(C) == ["r"]
    rig.intake.close("x", "has")
    rig.intake.close("x", "awaits")
    assert rig.features("r") == {A, B, C}


def test_a_request_that_finds_at_hand_all_that_the_engine_missed_stays_ready_D3(rig: Rig) -> None:
    rig.held = {A}
    rig.open("r", [A])
    rig.open("has", [A], [A])
    rig.arrive(A)
    assert rig.intake.missing("x", "r", [A]) == ()
    assert rig.intake.is_ready("x", "r")


def test_a_request_that_was_closed_while_the_engine_looked_needs_nothing_D3(rig: Rig) -> None:
    rig.held = {A}
    assert rig.intake.missing("x", "r", [A]) == ()
    rig.open("other", [A])
    assert rig.intake.missing("x", "r", [A]) == ()


@pytest.mark.parametrize("missing", [[A], [C], []], ids=["given", "foreign", "nothing"])
def test_an_engine_that_misses_what_it_need_not_hold_has_failed(rig: Rig, missing: list[Digest]) -> None:
    rig.held = {B}
    rig.open("r", [A, B], [A])
    rig.arrive(A)
    with pytest.raises(EngineFailed, match="request r"):
        rig.intake.missing("x", "r", missing)


def test_a_request_that_is_taken_up_again_asks_even_for_what_is_promised_D3(rig: Rig) -> None:
    rig.open("sends", [A], [A])
    rig.open("has", [B], [B])
    rig.arrive(B)
    assert rig.intake.reopen("x", "r", [A, B, C], [A, B]) == Opened((A,), is_ready=False)
    assert rig.features("r") == {B}
    rig.intake.close("x", "sends")
    assert rig.open("s", [A]).needed == (A,)
    assert rig.arrive(A) == ["r", "s"]
    assert rig.intake.missing("x", "r", [C]) == (C,)


def test_a_request_id_is_open_once_for_each_peer(rig: Rig) -> None:
    rig.open("r", [A])
    rig.open("r", [A], peer="y")
    with pytest.raises(ProtocolError, match="request r was submitted twice"):
        rig.open("r", [B], [B])
    rig.intake.forget("x")
    rig.intake.forget("y")
    assert rig.is_empty()


def test_a_payload_that_its_request_does_not_use_is_refused_without_a_trace(rig: Rig) -> None:
    with pytest.raises(ProtocolError, match="sends 1 features that it does not use"):
        rig.open("r", [A], [A, B])
    assert rig.is_empty()


def test_forgetting_a_peer_leaves_the_others_alone_D3(rig: Rig) -> None:
    rig.open("r", [A, B], [A, B])
    rig.arrive(A)
    rig.open("r", [A], peer="y")
    rig.intake.forget("x")
    rig.intake.forget("x")
    assert rig.arrive(B) == []
    assert (len(rig.intake), rig.features("r", "y")) == (1, {A})
