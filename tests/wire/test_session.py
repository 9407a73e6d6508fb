"""Sessions without I/O: handshake, order, windows, silence, drain, end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from semel.core import Key
from semel.errors import MediaTooLarge, ProtocolError
from semel.lab.testing.wire import MemoryWire
from semel.wire.codec import FROM_FRONTEND, FROM_WORKER, decode, encode, pack
from semel.wire.events import Arrived, Closed, Reset
from semel.wire.limits import Limits
from semel.wire.messages import (
    PROTOCOL,
    Abort,
    Accepted,
    Bye,
    Challenge,
    Chunk,
    Delta,
    Drain,
    Draining,
    Failed,
    Heartbeat,
    Hello,
    Message,
    Proof,
    Refusal,
    Status,
)
from tests.wire.examples import (
    KEY,
    OTHER_KEY,
    SMALL,
    Pair,
    digest_of,
    feature_of_rows,
    frontend_session,
    same,
    submit,
    worker_session,
)


@pytest.mark.parametrize(("frontend_key", "worker_key"), [(KEY, OTHER_KEY), (OTHER_KEY, KEY)])
def test_ends_with_different_keys_refuse_each_other_and_name_the_keys_S17(frontend_key: Key, worker_key: Key) -> None:
    frontend, worker = frontend_session(frontend_key), worker_session(worker_key)
    wire = MemoryWire(frontend, worker)
    wire.run()
    (reset,) = wire.frontend_events
    assert isinstance(reset, Reset)
    assert reset.code == "key"
    assert frontend_key.id in reset.message
    assert worker_key.id in reset.message
    assert not frontend.is_open
    assert not worker.is_open


def test_a_frontend_that_knows_the_keys_name_but_not_the_key_is_refused_S17() -> None:
    worker = worker_session()
    worker.receive(encode(0, 0, pack(Hello(PROTOCOL, KEY.id, "thief", b"n" * 32), SMALL)), 0.0)
    (challenge,) = worker.outgoing(0.0)
    proof = decode(challenge, FROM_WORKER, SMALL).message
    assert isinstance(proof, Challenge)
    # All that it has seen is the worker's own proof: it must not do as the frontend's.
    (reset,) = worker.receive(encode(0, 1, pack(Proof(proof.proof), SMALL)), 0.0)
    assert isinstance(reset, Reset)
    assert reset.code == "key"
    (last,) = worker.outgoing(0.0)
    assert isinstance(decode(last, FROM_WORKER, SMALL).message, Refusal)


def test_a_worker_that_does_not_have_the_key_learns_nothing_but_the_greeting_S17() -> None:
    frontend = frontend_session()
    frontend.outgoing(0.0)
    (reset,) = frontend.receive(encode(0, 0, pack(Challenge(b"m" * 32, b"p" * 32), SMALL)), 0.0)
    assert isinstance(reset, Reset)
    assert reset.code == "key"
    assert frontend.outgoing(0.0) == []
    with pytest.raises(ProtocolError, match="not open"):
        frontend.send(submit())


@pytest.mark.parametrize("message", [submit(), Abort("r"), Heartbeat(0), Proof(b"p" * 32), Bye("closed", "")])
def test_nothing_but_a_greeting_is_taken_from_a_stranger_S17(message: Message) -> None:
    worker = worker_session()
    (reset,) = worker.receive(encode(0, 0, pack(message, SMALL)), 0.0)
    assert isinstance(reset, Reset)
    assert reset.code == "handshake"
    assert worker.has_ended


def test_a_stranger_may_not_send_more_than_a_handshake_S10() -> None:
    (reset,) = worker_session().receive([bytes(SMALL.max_handshake_bytes + 1)], 0.0)
    assert isinstance(reset, Reset)
    assert reset.code == "handshake"


def test_another_version_of_the_protocol_is_refused_with_both_versions() -> None:
    (reset,) = worker_session().receive(encode(0, 0, pack(Hello(99, KEY.id, "f1", b"n" * 32), SMALL)), 0.0)
    assert reset == Reset("protocol", f"the worker speaks protocol {PROTOCOL}, the frontend 99")


def test_deltas_travel_together_and_keep_their_order_among_other_messages() -> None:
    pair = Pair().open()
    events = [
        Accepted("r1"),
        *(Delta(f"r{number}", 0, "x", (number,)) for number in range(600)),
        Failed("r7", 500, "engine_failed", "no"),
        Delta("r8", 0, "y", tuple(range(100))),
        Delta("r9", 0, "z", (1,), "stop"),
    ]
    for event in events:
        assert isinstance(event, Accepted | Delta | Failed)
        pair.worker.send(event)
    before = pair.wire.sent
    pair.wire.run()
    assert pair.wire.frontend_events == events
    assert pair.wire.sent - before == 7


def test_a_token_for_each_of_10_000_open_streams_is_40_messages_of_50_bytes_a_stream() -> None:
    pair = Pair(limits=Limits()).open()
    for number in range(10_000):
        pair.worker.send(Delta(f"request-{number:05}-0123456789abcdef", 0, " word", (12_345,)))
    messages = pair.worker.outgoing(0.0)
    assert len(messages) == 40
    assert sum(len(frame) for frames in messages for frame in frames) < 50 * 10_000


def test_a_small_feature_travels_whole_and_a_large_one_in_chunks() -> None:
    pair = Pair().open()
    small, large = feature_of_rows(5), feature_of_rows(200)
    pair.frontend.send_feature(digest_of(1), large)
    pair.frontend.send_feature(digest_of(2), small)
    pair.wire.run()
    arrived = [event for event in pair.wire.worker_events if isinstance(event, Arrived)]
    assert [event.digest for event in arrived] == [digest_of(2), digest_of(1)], "the small one does not wait"
    assert same(arrived[0].feature, small)
    assert same(arrived[1].feature, large)
    assert all(tensor.data.readonly for event in arrived for tensor in event.feature.tensors.values())


def test_bulk_in_flight_is_bounded_by_the_window_and_control_overtakes_the_rest() -> None:
    pair = Pair().open()
    for number in range(4):
        pair.frontend.send_feature(digest_of(number), feature_of_rows(200, seed=number))
    first = pair.frontend.outgoing(0.0)
    assert sum(len(frame) for frames in first for frame in frames) <= SMALL.window_bytes
    assert pair.frontend.outgoing(0.0) == [], "no credit, no bulk"
    pair.frontend.send(Abort("r1"))
    (urgent,) = pair.frontend.outgoing(0.0)
    assert decode(urgent, FROM_FRONTEND, SMALL).message == Abort("r1")
    for frames in [*first, urgent]:
        pair.wire.worker_events += pair.worker.receive(frames, 0.0)
    assert pair.wire.worker_events == [Abort("r1")]
    pair.wire.run()
    arrived = [event for event in pair.wire.worker_events if isinstance(event, Arrived)]
    assert {event.digest for event in arrived} == {digest_of(number) for number in range(4)}


def test_a_payload_larger_than_the_window_travels_when_nothing_else_does() -> None:
    pair = Pair(limits=replace(SMALL, inline_bytes=8192, window_bytes=1000)).open()
    pair.frontend.send_feature(digest_of(1), feature_of_rows(5))
    pair.frontend.send_feature(digest_of(2), feature_of_rows(300))
    pair.wire.pass_time(3.0)
    assert [event.digest for event in pair.wire.worker_events if isinstance(event, Arrived)] == [
        digest_of(1),
        digest_of(2),
    ]


def test_a_feature_that_is_withdrawn_stops_and_the_next_one_arrives() -> None:
    pair = Pair().open()
    begun = pair.frontend.send_feature(digest_of(1), feature_of_rows(200))
    waiting = pair.frontend.send_feature(digest_of(2), feature_of_rows(200))
    first = pair.frontend.outgoing(0.0)
    for frames in first:
        pair.worker.receive(frames, 0.0)
    for transfer in (begun, waiting, 77):
        pair.frontend.withdraw(transfer)
    pair.frontend.send_feature(digest_of(3), feature_of_rows(3))
    pair.wire.run()
    (event,) = pair.wire.worker_events
    assert isinstance(event, Arrived)
    assert event.digest == digest_of(3)
    pair.frontend.withdraw(begun)
    pair.wire.pass_time(30.0)
    assert pair.frontend.is_open
    assert pair.worker.is_open


def test_a_feature_over_the_limit_is_not_sent() -> None:
    pair = Pair(limits=replace(SMALL, max_feature_bytes=100)).open()
    with pytest.raises(MediaTooLarge, match="at most 100 bytes"):
        pair.frontend.send_feature(digest_of(1), feature_of_rows(10))


def test_more_open_features_than_allowed_reset_the_session_before_memory_is_taken_S10() -> None:
    pair = Pair().open()
    pair.frontend.send_feature(digest_of(1), feature_of_rows(1000))
    greedy = replace(SMALL, max_open_bytes=1000)
    worker = worker_session(limits=greedy)
    frontend = frontend_session()
    wire = MemoryWire(frontend, worker)
    wire.run()
    frontend.send_feature(digest_of(1), feature_of_rows(100))
    wire.run()
    assert [event.code for event in wire.worker_events if isinstance(event, Reset)] == ["overrun"]
    assert [event.code for event in wire.frontend_events if isinstance(event, Reset)] == ["overrun"]


@pytest.mark.parametrize(
    "chunk", [Chunk(1, 0, 64, 8), Chunk(1, 1, 0, 8), Chunk(2, 0, 0, 8), Chunk(1, 0, 0, 8)], ids=str
)
def test_a_chunk_that_is_not_the_next_resets_the_session(chunk: Chunk) -> None:
    pair = Pair().open()
    pair.frontend.send_feature(digest_of(1), feature_of_rows(100))
    first = pair.frontend.outgoing(0.0)
    for frames in first:
        assert not pair.worker.receive(frames, 0.0)
    envelope = decode(first[-1], FROM_FRONTEND, SMALL)
    frames = encode(envelope.epoch, envelope.sequence + 1, pack(chunk, SMALL), [memoryview(bytes(8))])
    (reset,) = pair.worker.receive(frames, 0.0)
    assert isinstance(reset, Reset)
    assert reset.code == "order"


def test_an_old_session_is_not_taken_up_again() -> None:
    old, new = Pair().open(), Pair()
    old.frontend.send(Abort("r1"))
    (frames,) = old.frontend.outgoing(0.0)
    (reset,) = new.worker.receive(frames, 0.0)
    assert isinstance(reset, Reset)
    assert reset.code == "session"
    (refusal,) = new.worker.outgoing(0.0)
    (told,) = old.frontend.receive(refusal, 0.0)
    assert isinstance(told, Reset), "the frontend learns that the worker does not know it"


def test_a_silent_peer_is_given_up_at_its_deadline_and_not_before() -> None:
    pair = Pair().open()
    deadline = 60.0
    assert pair.worker.tick(deadline - 0.01) == []
    (reset,) = pair.worker.tick(deadline)
    assert reset == Reset("silence", "nothing heard for 60 s")


def test_a_peer_is_excused_until_the_next_heartbeat_and_not_longer() -> None:
    """Control: without the excuse it is given up at once, as above."""
    pair = Pair().open()
    pair.worker.extend_deadline(100.0)
    assert pair.worker.tick(100.99) == []
    (reset,) = pair.worker.tick(101.0)
    assert isinstance(reset, Reset)
    late = worker_session()
    late.extend_deadline(20.0)
    assert late.tick(20.99) == []
    assert late.tick(21.0)


def test_a_peer_that_never_proves_itself_is_given_up() -> None:
    worker = worker_session()
    assert worker.tick(4.9) == []
    (reset,) = worker.tick(5.0)
    assert reset == Reset("silence", "no handshake within 5 s")


def test_idle_sessions_stay_open_by_their_heartbeats() -> None:
    pair = Pair().open()
    pair.wire.pass_time(3600.0)
    assert pair.frontend.is_open
    assert pair.worker.is_open
    assert pair.wire.frontend_events == pair.wire.worker_events == []


def test_a_peer_that_does_not_read_is_given_up_before_memory_runs_out() -> None:
    pair = Pair(limits=replace(SMALL, max_unread_bytes=10_000)).open()
    for number in range(1000):
        if not pair.worker.is_open:
            break
        pair.worker.send(Failed(f"r{number}", 500, "x", "y" * 100))
    assert pair.worker.next_deadline() < 0
    (reset,) = pair.worker.tick(0.0)
    assert isinstance(reset, Reset)
    assert reset.code == "overrun"


def test_the_next_slice_of_a_snapshot_waits_until_those_before_are_read() -> None:
    """A peer says so at once. Control: what is no slice, of which it says so with its next heartbeat."""
    pair = Pair(limits=replace(SMALL, max_unread_slice_bytes=1_000)).open()
    pair.wire.pass_time(1.0)  # the handshake is read too
    for more, is_told in ((True, True), (False, False)):
        sent = 0
        while pair.worker.has_read_slices:
            pair.worker.send(Status(0, 0, 0, 0, (digest_of(sent),) * 5, more=more))
            sent += 1
        assert (4 if more else 1) <= sent <= 7, "a part of what was read before may not be acknowledged yet"
        pair.wire.run()
        assert pair.worker.has_read_slices == is_told
    pair.wire.pass_time(1.0)
    assert pair.worker.has_read_slices


def test_a_peer_that_reads_is_never_overrun_however_much_comes_at_once() -> None:
    pair = Pair(limits=replace(SMALL, max_unread_bytes=10_000)).open()
    for number in range(100):
        pair.frontend.send(Abort("r" * 100))
        pair.worker.send(Failed(f"r{number}", 500, "x", "y" * 1000))
        pair.wire.run()  # no time passes, so no heartbeat is due
    assert len(pair.wire.frontend_events) == len(pair.wire.worker_events) == 100


def test_after_drain_a_frontend_submits_no_more() -> None:
    pair = Pair().open()
    pair.frontend.send(Drain())
    assert not pair.frontend.takes_submits
    with pytest.raises(ProtocolError, match="draining"):
        pair.frontend.send(submit())
    pair.frontend.send(Abort("r1"))
    pair.wire.run()
    assert pair.wire.worker_events == [Drain(), Abort("r1")]


def test_a_frontend_that_submits_after_drain_is_reset() -> None:
    pair = Pair().open()
    pair.frontend.send(Drain())
    (frames,) = pair.frontend.outgoing(0.0)
    drain = decode(frames, FROM_FRONTEND, SMALL)
    pair.worker.receive(frames, 0.0)
    (reset,) = pair.worker.receive(encode(drain.epoch, drain.sequence + 1, pack(submit(), SMALL)), 0.0)
    assert isinstance(reset, Reset)
    assert reset.code == "order"


def test_a_worker_that_drains_still_takes_what_was_on_its_way_and_finishes_it() -> None:
    pair = Pair().open()
    pair.worker.send(Draining())
    pair.frontend.send(submit())
    pair.wire.run()
    assert pair.wire.worker_events == [submit()]
    assert not pair.frontend.takes_submits
    pair.worker.send(Delta("r1", 0, "x", (1,), "stop"))
    pair.worker.close("drained")
    pair.wire.run()
    assert pair.wire.frontend_events == [Draining(), Delta("r1", 0, "x", (1,), "stop"), Closed("drained")]
    assert pair.frontend.has_ended


def test_an_ended_session_takes_and_gives_nothing_more() -> None:
    pair = Pair().open()
    pair.frontend.close()
    pair.wire.run()
    assert pair.wire.worker_events == [Closed("closed")]
    for session in (pair.frontend, pair.worker):
        assert session.receive([b"anything"], 0.0) == []
        assert session.reset("gone", "again") == []
        assert session.outgoing(99.0) == []
        assert session.tick(99.0) == []
        with pytest.raises(ProtocolError, match="not open"):
            session.send(Status(0, 0, 1, 2))
