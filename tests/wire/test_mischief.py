"""Dropped, duplicated, delayed and truncated messages: never a hang, never a wrong answer, always a reset."""

from __future__ import annotations

from typing import Final

from hypothesis import given, settings
from hypothesis import strategies as st

from semel.lab.testing.wire import MemoryWire, Mischief
from semel.wire.events import Admitted, Arrived, Event, Opened, Reset
from semel.wire.messages import Abort, Accepted, Delta, Failed
from tests.effort import examples
from tests.wire.examples import (
    CONTRACT,
    digest_of,
    feature_of_rows,
    frontend_session,
    same,
    submit,
    worker_session,
)

MESSAGES: Final = 80
"""About as many as the conversation below has."""

FEATURES: Final = {digest_of(number): feature_of_rows(rows, seed=number) for number, rows in enumerate((3, 60, 150))}

mischief = st.builds(
    Mischief,
    st.integers(0, MESSAGES),
    st.sampled_from(["drop", "duplicate", "delay", "truncate", "drop frame", "duplicate frame"]),
    st.integers(0, 10_000),
)


def converse(*mischiefs: Mischief) -> MemoryWire:
    """Open a session, submit with features, stream back, then let every deadline pass."""
    frontend, worker = frontend_session(), worker_session()
    wire = MemoryWire(frontend, worker, mischief=mischiefs)
    wire.run()
    for number in range(4):
        if frontend.is_open:
            frontend.send(submit(f"r{number}"))
            if number < len(FEATURES):
                frontend.send_feature(digest_of(number), FEATURES[digest_of(number)])
            frontend.send(Abort(f"r{number}"))
        if worker.is_open:
            worker.send(Accepted(f"r{number}"))
            worker.send(Delta(f"r{number}", 0, "text", (1, 2)))
            worker.send(Failed(f"r{number}", 500, "engine_failed", "no"))
        wire.run()
    wire.pass_time(60.0)
    return wire


def to_worker() -> list[Event]:
    return [Admitted("f1"), *(one for n in range(4) for one in (submit(f"r{n}"), Abort(f"r{n}")))]


def to_frontend() -> list[Event]:
    replies: list[Event] = [Opened(CONTRACT)]
    for n in range(4):
        replies += [Accepted(f"r{n}"), Delta(f"r{n}", 0, "text", (1, 2)), Failed(f"r{n}", 500, "engine_failed", "no")]
    return replies


def check(got: list[Event], sent: list[Event]) -> bool:
    """What came is a beginning of what was sent, features are what they were; whether it ended with a reset."""
    resets = [event for event in got if isinstance(event, Reset)]
    arrived = [event for event in got if isinstance(event, Arrived)]
    rest = [event for event in got if not isinstance(event, Reset | Arrived)]
    assert rest == sent[: len(rest)]
    assert len(resets) <= 1
    assert not resets or got[-1] is resets[0], "nothing comes after a reset"
    assert all(same(event.feature, FEATURES[event.digest]) for event in arrived)
    assert len({event.digest for event in arrived}) == len(arrived)
    if not resets:
        assert rest == sent
    return bool(resets)


def test_without_mischief_everything_arrives() -> None:
    wire = converse()
    assert not check(wire.worker_events, to_worker())
    assert not check(wire.frontend_events, to_frontend())
    assert {event.digest for event in wire.worker_events if isinstance(event, Arrived)} == FEATURES.keys()
    assert wire.sent > MESSAGES


@settings(max_examples=examples(400), deadline=None)
@given(st.lists(mischief, max_size=3))
def test_mischief_on_the_wire_gives_what_was_sent_or_a_reset_and_never_hangs(mischiefs: list[Mischief]) -> None:
    wire = converse(*mischiefs)
    reset = check(wire.worker_events, to_worker()) | check(wire.frontend_events, to_frontend())
    if not reset:
        assert {event.digest for event in wire.worker_events if isinstance(event, Arrived)} == FEATURES.keys()


def test_every_single_loss_is_noticed_by_both_ends() -> None:
    for number in range(MESSAGES):
        wire = converse(Mischief(number, "drop"))
        for events in (wire.worker_events, wire.frontend_events):
            assert isinstance(events[-1], Reset), f"message {number} was lost and nobody noticed"
