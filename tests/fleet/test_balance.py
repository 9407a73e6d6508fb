"""Which worker gets a request: held against what the rules say, over random fleets and under a virtual clock."""

from __future__ import annotations

import sys
from dataclasses import replace
from random import Random
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core import Digest
from tools.fleet.linear import Candidate
from tools.fleet.linear import shipped as choose
from tools.fleet.trace import Request, View, balanced, draw, round_robin, simulate

TRACES = 1_000

fleets = st.lists(
    st.builds(
        Candidate,
        name=st.text("abcdef", min_size=1, max_size=3),
        load=st.integers(0, 40),
        known_items=st.integers(0, 3),
    ),
    min_size=1,
    max_size=24,
    unique_by=lambda candidate: candidate.name,
)
digests = st.lists(st.binary(min_size=32, max_size=32).map(Digest), max_size=4)
prefixes = st.one_of(st.just(b""), st.binary(min_size=16, max_size=16))


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def digest_of(number: int) -> Digest:
    return Digest(number.to_bytes(32, "big"))


def fit(fleet: list[Candidate]) -> list[Candidate]:
    loads = [candidate.load for candidate in fleet]
    mean = sum(loads) / len(loads)
    least = next(load for load in sorted(loads) if sum(one <= load for one in loads) > (len(loads) - 1) // 10)
    bound = least + 3 + 0.1 * mean
    return [one for one in fleet if one.load <= bound + (min(0.4 * mean, 2) if one.known_items else 0)]


@given(fleets, digests, prefixes)
def test_nobody_is_chosen_who_is_busier_than_the_bound_which_is_wider_for_who_holds_items(
    fleet: list[Candidate], items: list[Digest], prefix: bytes
) -> None:
    assert fleet[choose(fleet, items, prefix)] in fit(fleet)


@pytest.mark.parametrize("count", [11, 100])
def test_an_idle_worker_among_many_busy_ones_does_not_draw_everybody(count: int) -> None:
    """It has just come, or fails at once. Control: over the minimum, which it is, nobody else is chosen."""
    fleet = [Candidate("idle", 0, 0), *(Candidate(f"w{number}", 18, 0) for number in range(1, count))]
    chosen = [fleet[choose(fleet, [], key_of(number))].name for number in range(2_000)]
    assert chosen.count("idle") / 2_000 < 2.5 / count, "when it is one of the two that a key ranks highest"
    over_the_least = 3 + 0.1 * 18
    assert [one.name for one in fleet if one.load <= over_the_least] == ["idle"]


@given(fleets, digests, prefixes, st.randoms(use_true_random=False))
def test_every_frontend_decides_alike_whatever_the_order_it_knows_workers_and_items_in(
    fleet: list[Candidate], items: list[Digest], prefix: bytes, random: Random
) -> None:
    other_fleet, other_items = list(fleet), list(items)
    random.shuffle(other_fleet)
    random.shuffle(other_items)
    assert fleet[choose(fleet, items, prefix)] == other_fleet[choose(other_fleet, other_items, prefix)]


@pytest.mark.parametrize("kind", ["items", "conversations"])
def test_what_nobody_holds_is_spread_over_all(kind: str) -> None:
    fleet = [Candidate(name, 0, 0) for name in "abcd"]
    chosen = [_chosen(fleet, kind, number) for number in range(1_000)]
    assert min(chosen.count(name) for name in "abcd") > 180


@pytest.mark.parametrize("kind", ["items", "conversations"])
def test_a_worker_that_is_lost_moves_only_its_own(kind: str) -> None:
    fleet = [Candidate(name, 0, 0) for name in "abcd"]
    for number in range(400):
        before = _chosen(fleet, kind, number)
        assert before == "d" or _chosen(fleet[:3], kind, number) == before


@pytest.mark.parametrize("kind", ["items", "conversations"])
def test_a_worker_that_joins_moves_only_what_it_gets_and_that_is_its_share(kind: str) -> None:
    """Control: a hash modulo the number of workers moves most of them."""
    fleet = [Candidate(name, 0, 0) for name in "abcde"]
    moved = modulo_moved = 0
    for number in range(2_000):
        before, after = _chosen(fleet[:4], kind, number), _chosen(fleet, kind, number)
        assert after in (before, "e")
        moved += after != before
        modulo_moved += crc32(key_of(number)) % 4 != crc32(key_of(number)) % 5
    assert moved / 2_000 == pytest.approx(1 / 5, abs=0.04)
    assert modulo_moved / 2_000 > 0.7


def test_the_next_turn_goes_where_the_conversation_began_unless_that_is_too_busy() -> None:
    fleet = [Candidate(name, 5, 0) for name in "abcdef"]
    home = choose(fleet, [], key_of(1))
    assert choose(fleet, [], key_of(1)) == home
    crowded = [replace(one, load=9) if index == home else one for index, one in enumerate(fleet)]
    assert choose(crowded, [], key_of(1)) != home


def test_among_equal_holders_the_conversation_decides_and_not_the_item() -> None:
    fleet = [Candidate(name, 0, 1) for name in "abcd"]
    chosen = {choose(fleet, [digest_of(1)], key_of(number)) for number in range(100)}
    assert chosen == {0, 1, 2, 3}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_no_trace_of_a_thousand_takes_over_a_twentieth_longer_than_round_robin(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Control: affinity with the wide bound of 1.25 times the mean and 4, which hot items and slow workers beat."""
    worst = naive_worst = 0.0
    encodes = rivals = items = 0
    for seed in range(TRACES):
        trace = draw(seed)
        ours, rival = simulate(trace, balanced), simulate(trace, round_robin)
        worst = max(worst, ours.makespan_s / rival.makespan_s)
        encodes, rivals, items = encodes + ours.encodes, rivals + rival.encodes, items + trace.distinct_items
        if seed < 60:
            naive_worst = max(naive_worst, simulate(trace, _wide).makespan_s / rival.makespan_s)
    with capsys.disabled():
        sys.stdout.write(
            f"\n{TRACES:,} traces: makespan at most {worst:.3f} of round robin's; encodes per distinct item "
            f"{encodes / items:.2f}, round robin {rivals / items:.2f}\n"
        )
    assert worst <= 1.05
    assert encodes < 0.65 * rivals
    assert naive_worst > 1.05


def _wide(number: int, view: View, request: Request) -> int:
    bound = 1.25 * sum(view.loads) / len(view.loads) + 4
    fit = [worker for worker, load in enumerate(view.loads) if load <= bound]
    held = [sum(item in held for item in request.items) for held in view.held]
    return max(fit, key=lambda worker: (held[worker], crc32(b"%d" % worker + request.talk)))


def _chosen(fleet: list[Candidate], kind: str, number: int) -> str:
    items, prefix = ([digest_of(number)], b"") if kind == "items" else ([], key_of(number))
    return fleet[choose(fleet, items, prefix)].name
