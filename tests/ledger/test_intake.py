"""The desk: a feature is kept as long as a request uses it, and a request waits for what will come."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from semel.core import Digest
from semel.errors import EngineFailed, ProtocolError
from semel.ledger import Intake, Opened
from tests.ledger.examples import DIGESTS, FEATURES

A, B, C = DIGESTS[:3]


class Rig:
    """A desk with one frontend, unless another is named, and an engine that holds `held`."""

    def __init__(self) -> None:
        self.desk: Intake[str] = Intake()
        self.held: set[Digest] = set()

    def open(self, request: str, digests: Iterable[Digest], payloads: Iterable[Digest] = (), peer: str = "x") -> Opened:
        return self.desk.open(peer, request, digests, payloads, self.held.__contains__)

    def arrive(self, digest: Digest, peer: str = "x") -> list[str]:
        return self.desk.arrive(peer, digest, FEATURES[digest])

    def features(self, request: str, peer: str = "x") -> set[Digest]:
        return set(self.desk.features(peer, request))

    def is_empty(self) -> bool:
        return (len(self.desk), self.desk.nbytes, self.desk._sessions, self.desk._at_hand) == (0, 0, {}, {})


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_request_waits_for_its_payloads_D1(rig: Rig) -> None:
    assert rig.open("r", [A, B, A], [A, B]) == Opened((), is_ready=False)
    assert (rig.arrive(A), rig.desk.is_ready("x", "r"), rig.desk.waiting) == ([], False, 1)
    assert (rig.arrive(B), rig.desk.is_ready("x", "r"), rig.desk.waiting) == (["r"], True, 0)
    assert rig.features("r") == {A, B}
    assert rig.desk.nbytes == FEATURES[A].nbytes + FEATURES[B].nbytes
    assert rig.desk.close("x", "r")
    assert rig.is_empty()
    assert not rig.desk.close("x", "r")
    assert not rig.desk.is_ready("x", "r")


def test_a_request_that_was_closed_while_the_engine_looked_needs_nothing_D3(rig: Rig) -> None:
    rig.held = {A}
    assert rig.desk.missing("x", "r", [A]) == ()
    rig.open("other", [A])
    assert rig.desk.missing("x", "r", [A]) == ()


@pytest.mark.parametrize("missing", [[A], [C], []], ids=["given", "foreign", "nothing"])
def test_an_engine_that_misses_what_it_need_not_hold_has_failed(rig: Rig, missing: list[Digest]) -> None:
    rig.held = {B}
    rig.open("r", [A, B], [A])
    rig.arrive(A)
    with pytest.raises(EngineFailed, match="request r"):
        rig.desk.missing("x", "r", missing)


def test_a_request_id_is_open_once_for_each_peer(rig: Rig) -> None:
    rig.open("r", [A])
    rig.open("r", [A], peer="y")
    with pytest.raises(ProtocolError, match="request r was submitted twice"):
        rig.open("r", [B], [B])
    rig.desk.forget("x")
    rig.desk.forget("y")
    assert rig.is_empty()


def test_a_payload_that_its_request_does_not_use_is_refused_without_a_trace(rig: Rig) -> None:
    with pytest.raises(ProtocolError, match="sends 1 features that it does not use"):
        rig.open("r", [A], [A, B])
    assert rig.is_empty()
