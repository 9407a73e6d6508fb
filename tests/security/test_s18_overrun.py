"""S18: no request, whatever it asks for, ends the session that all requests of a frontend share.

A session resets when a peer leaves too much unread, and a message over its limit is no message. So a worker waits for
room before it sends more of an answer, and sends an output with very many log probabilities in pieces.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from semel.core import Output, Submission
from semel.errors import InvalidRequest, ProtocolError, WorkerLost
from semel.wire.codec import pack
from semel.wire.limits import Limits
from semel.wire.messages import Delta, Deltas
from semel.wire.outputs import to_delta, to_deltas, to_output
from semel.wire.zmq import Peer, WorkerListener
from tests.worker.pairing import Rig, expected, rig

SMALL = Limits(max_control_bytes=256 << 10, max_unread_bytes=1 << 20)
SEQUENCES = 128


def output(index: int, tokens: int, entries: int, **fields: object) -> Output:
    """Tokens with log probabilities: about 25 bytes for each entry."""
    chosen = range(70_000, 70_000 + entries)
    steps = tuple(dict.fromkeys(chosen, -float(number)) for number in range(tokens))
    texts = (dict.fromkeys(chosen, "word"),) * tokens
    made = Output(index, "said", tuple(range(tokens)), steps, "length", texts=texts)
    return replace(made, **fields)


class Flood:
    """An answer that comes all at once, as that of `n` sequences does with a long `stream_interval`."""

    async def __aiter__(self) -> AsyncIterator[Output]:
        for index in range(SEQUENCES):
            yield output(index, tokens=50, entries=20)

    async def close(self) -> None:
        pass


async def _flood(_: Submission) -> Flood:
    return Flood()


@pytest.fixture
async def one(tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig(tmp_path, limits=SMALL) as made:
        yield made


async def flooded(one: Rig, monkeypatch: pytest.MonkeyPatch) -> list[Output]:
    monkeypatch.setattr(one.engine, "submit", _flood)
    async with asyncio.timeout(20):
        stream = await one.frontends[0].submit(n=SEQUENCES)
        try:
            return [got async for got in stream]
        finally:
            await stream.close()


async def test_an_answer_larger_than_what_may_be_unread_waits_and_the_session_lives(
    one: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = len(pack(Deltas((to_delta("r", output(0, 50, 20)),)), SMALL))
    assert SEQUENCES * each > SMALL.max_unread_bytes
    before = one.listener.peers
    got = await flooded(one, monkeypatch)
    assert [(piece.index, len(piece.token_ids)) for piece in got] == [(index, 50) for index in range(SEQUENCES)]
    assert one.listener.peers == before, "the same session"


async def test_a_worker_that_does_not_wait_ends_the_session_of_all(one: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The naive worker, as a control: it queues whatever the engine gives it."""

    async def at_once(_: WorkerListener, __: Peer) -> None:
        pass

    monkeypatch.setattr(WorkerListener, "until_room", at_once)
    with pytest.raises(WorkerLost):
        await flooded(one, monkeypatch)


async def test_who_waits_for_room_is_woken_when_the_session_ends(one: Rig) -> None:
    (peer,) = one.listener.peers
    session = one.listener._sessions[peer.identity]
    session._control.sent += SMALL.max_unread_bytes  # as if it were on its way
    waiting = asyncio.create_task(one.listener.until_room(peer))
    await asyncio.sleep(0)
    assert not waiting.done()
    one.listener.close(peer, "over")
    async with asyncio.timeout(10):
        await waiting
    assert not one.listener._rooms


@pytest.mark.parametrize("message", [None, {"content": "said"}])
def test_an_output_with_many_log_probabilities_travels_in_pieces(message: dict[str, object] | None) -> None:
    """Control: in one piece it is over the limit."""
    limits = Limits(max_control_bytes=1 << 20)
    whole = output(3, tokens=600, entries=128, message=message, cached_tokens=5, prompt_logprobs=(None,), stop_reason=7)
    with pytest.raises(ProtocolError, match="a message may have"):
        pack(Deltas((to_delta("r", whole),)), limits)
    deltas = list(to_deltas("r", whole))
    for delta in deltas:
        assert isinstance(delta, Delta)
        pack(Deltas((delta,)), limits)
    first, *_, last = pieces = [to_output(delta) for delta in deltas]
    assert tuple(token for piece in pieces for token in piece.token_ids) == whole.token_ids
    assert tuple(step for piece in pieces for step in piece.logprobs or ()) == whole.logprobs
    assert tuple(step for piece in pieces for step in piece.texts or ()) == whole.texts
    assert "".join(piece.text for piece in pieces) == "said"
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert (last.message, last.stop_reason, last.cached_tokens, last.prompt_logprobs) == (message, 7, None, None)
    assert (first.cached_tokens, first.prompt_logprobs, first.stop_reason) == (5, (None,), None)
    hides = [piece.message is not None for piece in pieces]
    assert hides == [message is not None] * len(pieces), "tokens of reasoning that is hidden stay hidden"


@pytest.mark.parametrize("value", ["x" * SMALL.max_control_bytes, 2**64], ids=["long", "a number of 65 bits"])
async def test_a_request_that_does_not_fit_into_a_message_is_refused_and_leaves_no_trace(
    one: Rig, value: object
) -> None:
    """Control: what a session says of it is a fault of the protocol, which a client would read as 500."""
    before, (frontend,) = one.listener.peers, one.frontends
    with pytest.raises(InvalidRequest, match="does not fit into one message") as refused:
        await frontend.ask(1, given=value)
    assert isinstance(refused.value.__cause__, ProtocolError)
    assert frontend.worker.load == 0
    assert await frontend.ask(1) == expected([1])
    assert one.listener.peers == before
