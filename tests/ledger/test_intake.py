"""The intake: a feature is kept as long as a request uses it, and a request waits for what will come."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from semel.core import Digest
from semel.errors import EngineFailed, ProtocolError
from semel.ledger import Intake, Opened
from tests.ledger.examples import DIGESTS, FEATURES

A, B, C = DIGESTS[:3]


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
