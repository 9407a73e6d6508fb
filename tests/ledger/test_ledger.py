"""The ledger: announcements are replayed, notes live as long as somebody relies on them, and memory is bounded."""

from __future__ import annotations

import tracemalloc

import pytest

from semel.core import FeatureInfo, Layout
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


def test_a_request_is_submitted_once(ledger: Ledger) -> None:
    ledger.submit("r", [])
    with pytest.raises(ValueError, match="submitted already"):
        ledger.submit("r", [])


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
