"""Heartbeats: every second while something goes on, every ten seconds when nothing does."""

from __future__ import annotations

from semel.wire.messages import Abort, Status
from tests.wire.examples import Pair


def beats(pair: Pair, seconds: float) -> int:
    before = pair.wire.sent
    pair.wire.pass_time(seconds)
    return pair.wire.sent - before


def test_an_idle_session_beats_ten_times_more_seldom() -> None:
    """Both ends. Control: the first ten seconds, in which something may still come of the last message."""
    pair = Pair().open()
    assert 16 <= beats(pair, 10.0) <= 24
    beats(pair, 10.0)
    assert 16 <= beats(pair, 100.0) <= 24
    assert pair.frontend.is_open
    assert pair.worker.is_open


def test_a_message_after_a_long_time_is_followed_by_a_beat_within_a_second() -> None:
    """So that it is noticed if it was lost. A worker's status is no such message: it comes again and again."""
    pair = Pair().open()
    pair.wire.pass_time(97.0)
    pair.worker.send(Status(0, 0, 1, 0))
    assert beats(pair, 0.0) == 1
    assert pair.worker.next_deadline() > pair.wire.now + 1.5
    pair.frontend.send(Abort("r1"))
    pair.wire.run()
    assert pair.frontend.next_deadline() <= pair.wire.now + 1.0
    assert pair.worker.next_deadline() <= pair.wire.now + 1.0
