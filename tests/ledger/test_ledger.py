"""The ledger: announcements are replayed, notes live as long as somebody relies on them, and memory is bounded."""

from __future__ import annotations

import tracemalloc
from time import thread_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.core import Digest, FeatureInfo, Layout
from semel.errors import ProtocolError
from semel.ledger import Announcement, Ledger
from semel.wire.translation import to_announcement, to_status
from tests.ledger.examples import DIGESTS, HOLDINGS, digest_of, gone, have

A, B, C = DIGESTS[:3]


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger()
    ledger.open()
    return ledger


# Announcements.


def test_what_was_announced_is_known_until_it_is_gone_D2(ledger: Ledger) -> None:
    ledger.announce(have(0, {A: HOLDINGS[A], B: HOLDINGS[B]}))
    ledger.announce(gone(1, [A]))
    assert (ledger.holding(A), ledger.holding(B)) == (None, HOLDINGS[B])
    assert (ledger.knows(A), ledger.knows(B), len(ledger)) == (False, True, 1)


def test_an_announcement_that_is_not_the_next_breaks_the_protocol_D2(ledger: Ledger) -> None:
    ledger.announce(have(0, {A: HOLDINGS[A]}))
    with pytest.raises(ProtocolError, match="from 1 to 2 came where 0 was known"):
        ledger.announce(gone(2, [A]))
    assert ledger.knows(A)
    ledger.announce(gone(1, [B]))
    with pytest.raises(ProtocolError, match="from 0 to 0 came where 1 was known"):
        ledger.announce(Announcement(0, 0, (A,)))
    assert ledger.knows(A)
    ledger.announce(Announcement(0, 3, (A,)))  # more than it lacks does no harm
    assert not ledger.knows(A)


def test_an_announcement_outside_of_a_session_breaks_the_protocol_D2(ledger: Ledger) -> None:
    ledger.close()
    with pytest.raises(ProtocolError, match="outside of a session"):
        ledger.announce(have(0, {}))


def test_a_new_session_begins_with_what_the_same_process_had_announced_and_nothing_in_transfer_D3() -> None:
    """Control: another process, of which nothing is known."""
    for incarnation, is_known in ((b"one", True), (b"other", False)):
        ledger = Ledger()
        ledger.open(b"one")
        ledger.announce(have(0, {A: HOLDINGS[A]}))
        ledger.submit("r", [A, B])
        ledger.close()
        assert ledger.resume == (b"one", 0)
        ledger.open(incarnation)
        assert (ledger.knows(A), ledger.knows(B)) == (is_known, False)
        assert (ledger.unsettled, ledger.settle("r")) == (0, ())
        ledger.announce(have(0, {}))
        assert not ledger.knows(A), "a snapshot replaces everything"


def test_a_snapshot_that_has_not_come_to_its_end_is_nothing_to_resume_from_D2(ledger: Ledger) -> None:
    found = [ledger.resume]
    for told in (
        Announcement(None, 5, holdings={A: HOLDINGS[A]}, more=True),
        Announcement(5, 6, (A,), more=True),
        Announcement(6, 6, holdings={B: HOLDINGS[B]}),
    ):
        ledger.announce(told)
        found.append(ledger.resume)
    assert found == [None, None, None, (b"", 6)]
    ledger.forget()
    assert (ledger.resume, len(ledger)) == (None, 0)


def test_an_announcement_of_something_gone_that_was_never_known_is_no_fault_D2(ledger: Ledger) -> None:
    ledger.announce(gone(0, [A]))
    assert not ledger.knows(A)


# Requests.


def test_a_request_sends_what_is_not_known_each_once_in_order_D1(ledger: Ledger) -> None:
    ledger.announce(have(0, {B: HOLDINGS[B]}))
    assert ledger.lacking([C, B, A, C]) == (C, A)
    assert ledger.submit("r", [C, B, A, C]) == (C, A)
    assert ledger.lacking([C, B, A]) == ()
    assert ledger.holding(A) is None


def test_what_one_request_has_just_sent_another_refers_to_D1(ledger: Ledger) -> None:
    assert ledger.submit("first", [A]) == (A,)
    assert ledger.submit("second", [A, B]) == (B,)


def test_a_note_ends_with_its_request_D2(ledger: Ledger) -> None:
    ledger.submit("r", [A])
    assert ledger.settle("r") == (A,)
    assert not ledger.knows(A)
    assert ledger.settle("r") == ()


def test_what_is_announced_before_its_request_is_accepted_stays_known_D1(ledger: Ledger) -> None:
    ledger.submit("r", [A])
    ledger.announce(have(0, {A: HOLDINGS[A]}))
    ledger.settle("r")
    assert ledger.submit("next", [A]) == ()


def test_a_note_outlives_its_request_while_another_relies_on_it_D3(ledger: Ledger) -> None:
    ledger.submit("first", [A, B])
    ledger.submit("second", [A])
    assert ledger.settle("first") == (B,)
    assert ledger.submit("third", [A]) == ()
    assert ledger.settle("second") == ()
    assert ledger.settle("third") == (A,)
    assert not ledger.knows(A)


def test_a_request_relies_on_transfers_also_for_what_was_announced_D3(ledger: Ledger) -> None:
    """The item may be evicted before the request arrives, and the worker then lets it wait for the transfer."""
    ledger.announce(have(0, {A: HOLDINGS[A]}))
    ledger.submit("refers", [A])
    ledger.announce(gone(1, [A]))
    assert ledger.submit("sends", [A]) == (A,)
    assert ledger.settle("sends") == ()


def test_a_request_is_submitted_once(ledger: Ledger) -> None:
    ledger.submit("r", [])
    with pytest.raises(ValueError, match="submitted already"):
        ledger.submit("r", [])


# Repairs.


def test_what_the_worker_asks_for_is_noted_when_it_is_sent_D3(ledger: Ledger) -> None:
    ledger.announce(have(0, {A: HOLDINGS[A]}))
    ledger.submit("r", [A])
    ledger.announce(gone(1, [A]))
    assert ledger.need("r", [A]) == (A,)
    assert not ledger.knows(A)
    assert ledger.send("r", [A]) == (A,)
    assert ledger.knows(A)
    assert ledger.settle("r") == (A,)


def test_what_another_request_is_sending_is_not_sent_twice_D3(ledger: Ledger) -> None:
    ledger.announce(have(0, {A: HOLDINGS[A]}))
    ledger.submit("first", [A])
    ledger.submit("second", [A])
    assert ledger.need("first", [A]) == ledger.need("second", [A]) == (A,)
    assert ledger.send("first", [A]) == (A,)
    assert ledger.send("second", [A]) == ()
    assert ledger.settle("first") == ()
    assert ledger.settle("second") == (A,)


def test_a_transfer_whose_request_is_settled_is_not_counted_on_D3(ledger: Ledger) -> None:
    """The worker may have dropped it on arrival: nobody waited for it there."""
    ledger.submit("first", [A])
    ledger.submit("second", [A])
    ledger.settle("first")
    assert ledger.need("second", [A]) == (A,)
    assert ledger.send("second", [A]) == (A,)


def test_asking_does_not_take_back_an_announcement_D2(ledger: Ledger) -> None:
    """A request may need to bring an item that is held, because its other items would push it out."""
    ledger.announce(have(0, {A: HOLDINGS[A]}))
    ledger.submit("r", [A])
    assert ledger.need("r", [A]) == ledger.send("r", [A]) == (A,)
    ledger.settle("r")
    assert ledger.knows(A)


def test_a_request_that_the_engine_took_and_missed_counts_again_D3(ledger: Ledger) -> None:
    ledger.submit("r", [A])
    ledger.settle("r")
    assert ledger.need("r", [A]) == ledger.send("r", [A]) == (A,)
    assert (ledger.unsettled, ledger.settle("r"), ledger.unsettled) == (1, (A,), 0)


def test_what_was_needed_before_a_request_was_settled_is_not_sent_after_D3(ledger: Ledger) -> None:
    ledger.announce(have(0, {A: HOLDINGS[A], B: HOLDINGS[B]}))
    ledger.submit("r", [A, B])
    ledger.need("r", [A])
    ledger.settle("r")
    assert ledger.send("r", [A]) == ()
    ledger.need("r", [B])
    assert ledger.send("r", [A, B]) == (B,)


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.sampled_from(DIGESTS), max_size=4)), max_size=30))
def test_nothing_is_left_when_all_are_settled_D3(steps: list[tuple[int, list[Digest]]]) -> None:
    ledger = Ledger()
    ledger.open()
    unsettled: set[str] = set()
    for number, digests in steps:
        request = str(number)
        if request in unsettled and digests:
            ledger.need(request, digests)
            ledger.send(request, digests)
        elif request in unsettled:
            ledger.settle(request)
            unsettled.remove(request)
        else:
            ledger.submit(request, digests)
            unsettled.add(request)
    for request in unsettled:
        ledger.settle(request)
    assert not (ledger._requests or ledger._counting or ledger._notes)


# Memory.


def test_over_its_bound_a_ledger_forgets_what_was_announced_longest_ago_D2() -> None:
    ledger = Ledger(max_digests=2)
    ledger.open()
    ledger.announce(have(0, {A: HOLDINGS[A], B: HOLDINGS[B]}))
    ledger.announce(have(1, {A: HOLDINGS[A], C: HOLDINGS[C]}))
    assert [ledger.knows(digest) for digest in (A, B, C)] == [True, False, True]
    ledger.announce(gone(2, [B]))


def test_the_bytes_of_layouts_are_bounded_too_D2() -> None:
    """Eight bytes a run, so a long run costs no more than a short one, and no token repeats in a large layout."""
    ledger = Ledger(max_layout_bytes=100)
    ledger.open()
    ledger.announce(have(0, {digest_of(n): FeatureInfo("video", 1, Layout((n, n, n, n + 1, n, n))) for n in range(10)}))
    assert [n for n in range(10) if ledger.knows(digest_of(n))] == [6, 7, 8, 9]
    ledger.announce(have(1, {A: FeatureInfo("video", 1, Layout((0,) * 1_000))}))
    assert ledger.knows(A)
    ledger.announce(have(2, {A: FeatureInfo("video", 1, Layout(tuple(range(13))))}))
    assert len(ledger) == 0
    ledger.announce(gone(3, DIGESTS))
    assert ledger._announced._layout_bytes == 0


@pytest.mark.slow
def test_a_million_digests_take_less_than_200_MB_D2(ledger: Ledger) -> None:
    count, per_message = 1 << 16, 256
    tracemalloc.start()
    try:
        for number in range(count // per_message):
            start = number * per_message
            layouts = [Layout(tuple([151655] * (16 * size))) for size in range(16)]
            infos = [FeatureInfo("image", 1176 * 64 * size, layout) for size, layout in enumerate(layouts)]
            told = have(number, {digest_of(n): infos[n % 16] for n in range(start, start + per_message)})
            ledger.announce(to_announcement(to_status(told, 0, 0)))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(ledger) == count
    assert taken / count * (1 << 20) < 200e6


@pytest.mark.alone
def test_asking_whether_a_digest_is_known_takes_less_than_a_microsecond_D2(ledger: Ledger) -> None:
    ledger.announce(have(0, {digest_of(n): HOLDINGS[A] for n in range(10_000)}))
    asked = [digest_of(n) for n in range(20_000)]
    best = 1.0
    for _ in range(5):
        began = thread_time()
        assert sum(map(ledger.knows, asked)) == 10_000
        best = min(best, (thread_time() - began) / len(asked))
    assert best < 1e-6
