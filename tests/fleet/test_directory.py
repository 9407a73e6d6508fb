"""One directory for all workers: it knows what their ledgers know, and chooses as a scan of all workers does."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from semel.core import Digest, FeatureInfo, Layout
from semel.fleet import balance
from semel.fleet.balance import Balance
from semel.fleet.ranking import Ranking
from semel.ledger import Directory, Holders, Ledger
from tests.effort import examples
from tests.ledger.examples import have
from tests.operations import operations
from tools.fleet.random_fleets import differing

FLEETS = 1_000
"""By `python -m tools.fleet.random_fleets` a hundred thousand."""

INFO = FeatureInfo("image", 1, Layout((7,)))


def test_random_fleets_are_chosen_from_as_by_a_scan_of_all_workers_D1() -> None:
    assert list(differing(examples(FLEETS))) == []


def _deaf(self: Holders, digest: Digest, bit: int) -> None:
    """A directory that does not hear of what is gone."""


def _alone(self: Holders, digest: Digest, bit: int) -> None:
    """A directory in which an item has one worker at a time."""
    self._sets[digest] = bit


def _forgetful(self: Ranking, number: int, name: str) -> None:
    """A ranking that is kept when a worker comes."""
    self._names[number] = name.encode()


def _busy(self: Balance, number: int, load: int) -> None:
    """A balance that keeps the load that a worker came with."""


def _without_carry(sums: list[int], place: int, workers: int) -> None:
    """Whoever has any of the items has as many as the others."""
    sums[:] = [(sums or [0])[0] | workers]


@pytest.mark.parametrize(
    ("part", "name", "mutant"),
    [
        (Holders, "discard", _deaf),
        (Holders, "add", _alone),
        (Ranking, "put", _forgetful),
        (Balance, "set_load", _busy),
        (balance, "_add_at", _without_carry),
    ],
)
def test_mutants_are_found_within_the_same_fleets(
    monkeypatch: pytest.MonkeyPatch, part: Any, name: str, mutant: Callable[..., Any]
) -> None:
    monkeypatch.setattr(part, name, mutant)
    assert any(map(str, differing(FLEETS)))


def test_nothing_is_left_of_a_worker_that_lost_its_session_or_left_D3() -> None:
    directory = Directory()
    one, other = Ledger(directory), Ledger(directory)
    digests = [Digest(bytes([number]) * 32) for number in range(4)]
    for ledger in (one, other):
        ledger.open()
        ledger.announce(have(0, dict.fromkeys(digests[:2], INFO)))
        ledger.submit("r", digests)
    assert directory.holders(digests) == [0b11] * 4
    one.close()
    one.forget()
    assert directory.holders(digests) == [0b10] * 4
    other.move(elsewhere := Directory())
    assert directory.holders(digests) == []
    assert (len(directory.announced), len(directory.sent)) == (0, 0)
    assert elsewhere.holders(digests) == [0b1] * 4
    assert other.knows(digests[0])
    assert set(other.settle("r")) == set(digests[2:])
    assert elsewhere.holders(digests) == [0b1] * 2


def _many(workers: int, held: int) -> Callable[[], object]:
    """A choice among so many workers, one of which has so many items."""
    random = Random(workers)
    directory, workload = Directory(), Balance()
    digests = [Digest(random.randbytes(32)) for _ in range(held)]
    ledgers = [Ledger(directory) for _ in range(workers)]
    for ledger in ledgers:
        workload.put(ledger.number, f"tcp://10.0.0.{ledger.number}:9000", random.randint(0, 20))
    ledgers[workers // 2].open()
    ledgers[workers // 2].announce(have(0, dict.fromkeys(digests, INFO)))
    everybody = (1 << workers) - 1
    return lambda: workload.choose(everybody, digests, directory.holders(digests), b"a conversation")


def test_a_choice_among_a_thousand_costs_about_as_much_as_one_among_ten() -> None:
    """A scan takes a hundred times as many operations."""
    assert operations(_many(1_000, 50)) < 10 * operations(_many(10, 50))
