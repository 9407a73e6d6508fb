"""Which worker gets a request: held against what the rules say, over random fleets."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from semel.core import Digest
from semel.frontend.balance import Candidate, choose

fleets = st.lists(
    st.builds(
        Candidate, name=st.text("abcdef", min_size=1, max_size=3), load=st.integers(0, 40), held=st.integers(0, 3)
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda candidate: candidate.name,
)
digests = st.lists(st.binary(min_size=32, max_size=32).map(Digest), max_size=4)


@given(fleets, digests)
def test_nobody_is_chosen_who_is_busier_than_a_quarter_over_the_mean_and_four_more(
    fleet: list[Candidate], items: list[Digest]
) -> None:
    mean = sum(candidate.load for candidate in fleet) / len(fleet)
    assert fleet[choose(fleet, items)].load <= 1.25 * mean + 4


@given(fleets, digests)
def test_of_those_who_are_not_too_busy_the_one_that_holds_most_is_chosen(
    fleet: list[Candidate], items: list[Digest]
) -> None:
    mean = sum(candidate.load for candidate in fleet) / len(fleet)
    fit = [candidate for candidate in fleet if candidate.load <= 1.25 * mean + 4]
    chosen = fleet[choose(fleet, items)]
    if items:
        assert chosen.held == max(candidate.held for candidate in fit)
    else:
        assert chosen.load == min(candidate.load for candidate in fit)


@given(fleets, digests, st.randoms(use_true_random=False))
def test_every_frontend_decides_alike_whatever_the_order_it_knows_workers_and_items_in(
    fleet: list[Candidate], items: list[Digest], random: Random
) -> None:
    other_fleet, other_items = list(fleet), list(items)
    random.shuffle(other_fleet)
    random.shuffle(other_items)
    assert fleet[choose(fleet, items)] == other_fleet[choose(other_fleet, other_items)]


def test_items_that_nobody_holds_are_spread_over_all() -> None:
    fleet = [Candidate(name, 0, 0) for name in "abcd"]
    chosen = [choose(fleet, [Digest(number.to_bytes(32, "big"))]) for number in range(1_000)]
    assert min(chosen.count(index) for index in range(4)) > 150


def test_a_worker_that_is_lost_moves_only_its_own_items() -> None:
    fleet = [Candidate(name, 0, 0) for name in "abcd"]
    for number in range(200):
        items = [Digest(number.to_bytes(32, "big"))]
        before = fleet[choose(fleet, items)].name
        if before != "d":
            assert fleet[:3][choose(fleet[:3], items)].name == before
