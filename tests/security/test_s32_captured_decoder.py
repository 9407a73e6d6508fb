"""S32: a pool process that is taken over takes neither the event loop nor memory by what it says, nor lies to clients.

Each long answer is sent by a script at the other end of the pipe. On the way it was before, up to 16 MiB of it were
read and decoded on the event loop before anything was checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from struct import pack
from typing import Any

import msgspec
import pytest

from semel.core import Feature, Layout, Media, Origin, Tensor
from semel.errors import MediaTooLarge, RequestError, SemelError, ServiceError, told_kinds
from semel.processing.pool import process as process_module
from semel.processing.pool.job import OfferLimits
from semel.processing.pool.pipe import (
    Answer,
    Failed,
    Made,
    Offer,
    decode_answer,
    encode,
    to_error,
    to_failure,
    to_feature,
    to_made,
)
from semel.processing.pool.pool import Pool
from semel.processing.pool.process import PoolProcess
from semel.wire.messages import Runs
from tests.processing.scripted_pool import ONE_TOKEN, Peer, scripted_pool

MIB = 1 << 20
LOOP_S = 0.010
TAKEN_BYTES = 2 * MIB
"""What the kernel takes of an answer that nobody reads, and more."""


def said(kind: str, **fields: Any) -> bytes:
    return msgspec.msgpack.encode({"type": kind, "item": 0, **fields})


def made(**fields: Any) -> bytes:
    return said("made", **{"modality": "image", "tensors": [], "layout": ONE_TOKEN, **fields})


ROWS: dict[str, Callable[[], bytes]] = {
    "long token ids": lambda: made(token_ids=[70_000] * MIB, mask=None),
    "short token ids": lambda: made(token_ids=[7] * 4 * MIB, mask=None),
    "tensors": lambda: made(tensors=[["", "uint8", [0]]] * (MIB // 3), token_ids=[7], mask=None),
    "sizes of pieces": lambda: said("heard", samples=1, sampling_rate=1, sizes=[0] * 4 * MIB),
    "runs": lambda: made(layout=[pack("<4i", 7, 1, 8, 1) * (MIB // 4), None]),
    "an origin": lambda: made(origin=msgspec.msgpack.encode([[0] * 4 * MIB])),
    "counts of tokens": lambda: said("tokens", counts=[0] * 4 * MIB),
    "the text of an error": lambda: said("failed", error="ServiceError", message="x" * 4 * MIB),
}


class _OldMade(msgspec.Struct, frozen=True, tag="made"):
    """As it was."""

    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    token_ids: tuple[int, ...]


class _OldClipPieces(msgspec.Struct, frozen=True, tag="heard"):
    sizes: tuple[int, ...]


class Decoding:
    """The CPU time that answers took to decode."""

    def __init__(self, decode: Callable[[bytes | memoryview, int], Answer]) -> None:
        self.seconds = 0.0
        self._decode = decode

    def __call__(self, body: bytes | memoryview, *, payload_bytes: int) -> Answer:
        began = time.thread_time()
        try:
            return self._decode(body, payload_bytes)
        finally:
            self.seconds += time.thread_time() - began


async def check_it_costs_nothing(
    row: str, monkeypatch: pytest.MonkeyPatch, *, is_offered: bool, decode: Callable[[bytes | memoryview, int], Answer]
) -> None:
    decoding = Decoding(decode)
    monkeypatch.setattr(process_module, "decode_answer", decoding)
    body, peers = ROWS[row](), list[Peer]()

    async def say(peer: Peer) -> None:
        peers.append(peer)
        await peer.receive()
        if is_offered:
            await peer.send(Offer(0, 0, 1))
            await peer.receive()
        await peer.send_bytes(pack("<IQ", len(body), 0) + body)
        await peer.receive()

    async with scripted_pool(say, offers=OfferLimits(max_tokens=1_000)) as pool:
        with pytest.raises(ServiceError, match="the log of this frontend says why"):
            await pool.process(Media("image", b"x"))
        assert pool.pids == (), "it is ended"
    assert decoding.seconds < LOOP_S
    assert peers[0].sent_bytes < TAKEN_BYTES


def decode_shipped(body: bytes | memoryview, payload_bytes: int) -> Answer:
    return decode_answer(body, payload_bytes=payload_bytes)


def decode_as_it_was(body: bytes | memoryview, payload_bytes: int) -> Answer:
    with suppress(msgspec.ValidationError):
        msgspec.msgpack.decode(body, type=_OldMade | _OldClipPieces)
    return decode_answer(body, payload_bytes=payload_bytes)


@pytest.mark.parametrize("is_offered", [False, True], ids=["first", "after an offer"])
@pytest.mark.parametrize("row", ROWS)
async def test_a_long_answer_costs_the_event_loop_nothing_and_ends_its_process_S32(
    row: str, is_offered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await check_it_costs_nothing(row, monkeypatch, is_offered=is_offered, decode=decode_shipped)


@pytest.mark.parametrize("row", [*ROWS][:4])
async def test_control_under_the_old_limit_each_of_them_takes_the_event_loop_S32(
    row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = PoolProcess.ask

    async def ask(self: PoolProcess, order: bytes, payload: bytes = b"", **limits: int) -> tuple[Answer, memoryview]:
        return await shipped(self, order, payload, **limits | {"max_message_bytes": 16 * MIB})

    monkeypatch.setattr(PoolProcess, "ask", ask)
    with pytest.raises(AssertionError, match="seconds"):
        await check_it_costs_nothing(row, monkeypatch, is_offered=False, decode=decode_as_it_was)


async def test_a_feature_that_was_not_offered_is_not_taken_S32() -> None:
    """Eight bytes can say a million tokens, which no limit has seen."""

    async def say(peer: Peer) -> None:
        await peer.receive()
        await peer.send(Made(0, "image", (), Runs(pack("<2i", 7, MIB))))
        await peer.receive()

    for call in (Pool.process, Pool.lay_out):
        async with scripted_pool(say, offers=OfferLimits(max_tokens=1_000)) as pool:
            with pytest.raises(ServiceError, match="the log of this frontend says why"):
                await call(pool, Media("image", b"x"))
            assert pool.pids == ()


def test_the_longest_answer_that_is_read_costs_the_event_loop_less_than_ten_milliseconds_S32() -> None:
    tokens = (320 << 10) // 12
    longest = Made(
        *(0, "image", ()),
        Runs(pack("<4i", 7, 1, 8, 1) * (tokens // 2), pack("<i", 1) * tokens),
        origin=msgspec.msgpack.encode([[0] * 60_000]),
    )
    offer, body = Offer(0, 0, tokens), encode(longest)[12:]
    assert len(body) <= offer.max_message_bytes
    costs = []
    for _ in range(3):
        began = time.thread_time()
        answer = decode_answer(body, payload_bytes=0)
        offer.check_answer(answer)
        assert isinstance(answer, Made)
        assert len(to_feature(answer, memoryview(b"")).layout) == tokens
        costs.append(time.thread_time() - began)
    assert min(costs) < LOOP_S


def test_what_is_too_long_to_be_said_is_refused_where_it_is_made_S32() -> None:
    """An honest process is not ended for it."""
    many = {str(number): Tensor("uint8", (0,), memoryview(b"")) for number in range(65)}
    with pytest.raises(ServiceError, match="65 tensors; the limit is 64"):
        to_made(0, Feature("image", many, Layout((7,))))
    with pytest.raises(MediaTooLarge, match="send fewer frames"):
        to_made(0, Feature("video", {}, Layout((7, 8) * 40_000)))
    with pytest.raises(MediaTooLarge, match="send fewer frames"):
        to_made(0, Feature("video", {}, Layout((7,)), Origin((1,), {"frames": [*range(1 << 16, 1 << 17)]})))


ALLOWED = {"InvalidRequest", "MediaError", "MediaUndecodable", "MediaDegenerate", "MediaTooLarge", "PromptTooLong"}


@pytest.mark.parametrize("name", sorted({kind.__name__ for kind in told_kinds()} | {"ProtocolError", "FeatureMissing"}))
def test_a_process_says_that_an_item_is_at_fault_or_that_it_failed_and_nothing_else_S32(name: str) -> None:
    error = to_error(Failed(name, "no"))
    assert type(error).__name__ == (name if name in ALLOWED else "ServiceError")
    assert not isinstance(error, RequestError) or error.status in {400, 413}


def test_the_text_of_an_error_is_cut_S32() -> None:
    assert len(str(to_error(Failed("InvalidRequest", "x" * 60_000)))) == 1_024
    assert len(encode(to_failure(SemelError("\U0001f600" * MIB)))) < 64 << 10
