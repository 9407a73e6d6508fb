"""S23, S21: a pool process that is taken over says what it likes of sizes, and takes no more memory of the frontend.

Whatever it sends has been offered, admitted and paid for before a byte of it is read. Each lie is told by a script at
the other end of the pipe; on the way it was before, each of them works.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from semel.cache import SharedCache
from semel.core import Layout, Media
from semel.errors import ProtocolError, ServiceError
from semel.processing.pool import process as process_module
from semel.processing.pool.job import OfferLimits
from semel.processing.pool.pipe import (
    Answer,
    ClipPieces,
    Made,
    Offer,
    Send,
    TensorHead,
    Text,
    Tokens,
    decode_answer,
)
from semel.processing.pool.pool import Pool
from semel.processing.pool.process import PoolProcess
from semel.wire.layout_runs import to_runs
from tests.processing.scripted_pool import ONE_TOKEN, Peer, scripted_pool

MIB = 1 << 20
LIE_BYTES = 32 * MIB
PIPE_BYTES = MIB
"""More than the kernel takes of a payload that nobody reads."""


@dataclass
class Trial:
    """A pool whose process lies, and what it got for it."""

    spent: list[int] = field(default_factory=list)
    peers: list[Peer] = field(default_factory=list)


def made(item: int, nbytes: int, *, tokens: int = 1, is_written: bool = False) -> Made:
    return Made(item, "image", (TensorHead("pixels", "uint8", (nbytes,)),), to_runs(Layout((7,) * tokens)), is_written)


async def send_what_was_not_offered(peer: Peer) -> None:
    await peer.receive()
    await peer.send(made(0, LIE_BYTES), LIE_BYTES)


async def send_more_than_was_offered(peer: Peer) -> None:
    await peer.receive()
    await peer.send(Offer(0, 1, 1))
    assert isinstance((await peer.receive())[0], Send)
    await peer.send(made(0, LIE_BYTES), LIE_BYTES)


async def write_more_than_was_offered(peer: Peer) -> None:
    await peer.receive()
    await peer.send(Offer(0, 1, 1))
    assert isinstance((await peer.receive())[0], Send)
    await peer.send(made(0, 60, is_written=True))


async def write_nothing_of_what_was_offered(peer: Peer) -> None:
    await peer.receive()
    await peer.send(Offer(0, 1, 1))
    assert isinstance((await peer.receive())[0], Send)
    await peer.send(Made(0, "image", (), ONE_TOKEN, is_written=True))


async def write_elements_of_no_size(peer: Peer) -> None:
    await peer.receive()
    await peer.send(Offer(0, 1, 1))
    assert isinstance((await peer.receive())[0], Send)
    await peer.send(Made(0, "image", (TensorHead("pixels", "unknown", (1,)),), ONE_TOKEN, is_written=True))


async def send_what_was_to_be_written(peer: Peer) -> None:
    await peer.receive()
    await peer.send(Offer(0, LIE_BYTES, 1))
    assert isinstance((await peer.receive())[0], Send)
    await peer.send(made(0, LIE_BYTES), LIE_BYTES)


async def send_more_tokens_than_were_offered(peer: Peer) -> None:
    await peer.receive()
    await peer.send(Offer(0, 64, 1))
    assert isinstance((await peer.receive())[0], Send)
    await peer.send(made(0, 64, tokens=100_000), 64)


async def offer_less_than_nothing(peer: Peer) -> None:
    """What is paid for it would come back to the account."""
    await peer.receive()
    await peer.send(Offer(0, -LIE_BYTES, 1))
    await peer.receive()
    await peer.send(Made(0, "image", (), ONE_TOKEN))


async def offer_a_layout(peer: Peer) -> None:
    await peer.receive()
    await peer.send(Offer(0, LIE_BYTES, 1))
    await peer.receive()
    await peer.send(Made(0, "image", (), ONE_TOKEN))


async def send_pieces_that_were_not_offered(peer: Peer) -> None:
    await peer.receive()
    await peer.send(ClipPieces(0, 16_000, 16_000, (LIE_BYTES,)), LIE_BYTES)


async def send_more_pieces_than_were_offered(peer: Peer) -> None:
    await peer.receive()
    await peer.send(Offer(0, 1))
    await peer.receive()
    await peer.send(ClipPieces(0, 16_000, 16_000, (LIE_BYTES,)), LIE_BYTES)


async def send_many_tokens_of_a_short_text(peer: Peer) -> None:
    await peer.receive()
    await peer.send(Tokens(0, 1, LIE_BYTES // 4 - 1), LIE_BYTES)


async def send_a_long_text_of_few_tokens(peer: Peer) -> None:
    await peer.receive()
    await peer.send(Text(0, LIE_BYTES), LIE_BYTES)


async def process(pool: Pool, trial: Trial) -> None:
    await pool.process(Media("image", b"x"), spend=trial.spent.append)


async def lay_out(pool: Pool, trial: Trial) -> None:
    del trial
    await pool.lay_out(Media("image", b"x"))


async def cut(pool: Pool, trial: Trial) -> None:
    await pool.cut(Media("audio", b"x"), trial.spent.append)


async def tokenize(pool: Pool, trial: Trial) -> None:
    del trial
    await pool.tokenize(["x"])


async def detokenize(pool: Pool, trial: Trial) -> None:
    del trial
    await pool.detokenize([1])


Order = Callable[[Pool, Trial], Coroutine[Any, Any, None]]
Lie = Callable[[Peer], Coroutine[Any, Any, None]]

LIES: dict[Lie, Order] = {
    send_what_was_not_offered: process,
    send_more_than_was_offered: process,
    write_more_than_was_offered: process,
    write_nothing_of_what_was_offered: process,
    write_elements_of_no_size: process,
    send_what_was_to_be_written: process,
    send_more_tokens_than_were_offered: process,
    offer_less_than_nothing: process,
    offer_a_layout: lay_out,
    send_pieces_that_were_not_offered: cut,
    send_more_pieces_than_were_offered: cut,
    send_many_tokens_of_a_short_text: tokenize,
    send_a_long_text_of_few_tokens: detokenize,
}

STAGED = (
    write_more_than_was_offered,
    write_nothing_of_what_was_offered,
    write_elements_of_no_size,
    send_what_was_to_be_written,
)
"""Told by a process that has staging memory."""

lies = pytest.mark.parametrize("lie", LIES, ids=lambda one: one.__name__)


async def check_is_not_believed(lie: Lie) -> None:
    trial = Trial()

    async def tell(peer: Peer) -> None:
        trial.peers.append(peer)
        await lie(peer)
        await peer.receive()  # until its pipe is closed

    memory = SharedCache.create(MIB) if lie in STAGED else None
    try:
        async with scripted_pool(tell, memory=memory, offers=OfferLimits(max_tokens=1_000)) as pool:
            with pytest.raises(ServiceError, match="the log of this frontend says why"):
                await LIES[lie](pool, trial)
            assert pool.pids == (), "a process that lies is ended"
    finally:
        if memory is not None:
            memory.close()
    assert trial.peers[0].sent_bytes < PIPE_BYTES
    assert all(0 <= nbytes <= 64 for nbytes in trial.spent)


@lies
async def test_what_a_process_says_of_sizes_is_not_believed_S23_S21(lie: Lie) -> None:
    await check_is_not_believed(lie)


@pytest.mark.parametrize(("stages", "nbytes"), [(False, 60), (True, 257 * MIB)])
async def test_nothing_is_read_from_staging_memory_that_is_not_there_S23(stages: bool, nbytes: int) -> None:
    async def tell(peer: Peer) -> None:
        await peer.receive()
        await peer.send(made(0, nbytes, is_written=True))
        await peer.receive()

    memory = SharedCache.create(MIB) if stages else None
    try:
        async with scripted_pool(tell, memory=memory, offers=OfferLimits(max_bytes=1 << 40)) as pool:
            with pytest.raises(ServiceError, match="the log of this frontend says why"):
                await pool.process(Media("image", b"x"))
            assert pool.pids == ()
    finally:
        if memory is not None:
            memory.close()


class _AnyOffer(msgspec.Struct, frozen=True, tag="offer"):
    """As it was: any number will do."""

    item: int
    nbytes: int
    tokens: int = 0


def decode_any_offer(body: bytes | memoryview, *, payload_bytes: int) -> Answer:
    try:
        offer = msgspec.msgpack.decode(body, type=_AnyOffer)
    except msgspec.ValidationError:
        return decode_answer(body, payload_bytes=payload_bytes)
    return Offer(offer.item, offer.nbytes, offer.tokens)


@lies
async def test_control_without_the_bounds_each_lie_works_S23_S21(lie: Lie, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was: any answer up to the memory of a process, to any order, and any number in an offer."""
    shipped = PoolProcess.ask

    async def ask(self: PoolProcess, order: bytes, payload: bytes = b"", **limits: int) -> tuple[Answer, memoryview]:
        return await shipped(self, order, payload, **limits | {"max_payload_bytes": 1 << 62})

    monkeypatch.setattr(PoolProcess, "ask", ask)
    monkeypatch.setattr(Offer, "check_answer", lambda *_: None)
    monkeypatch.setattr("semel.processing.pool.job.LayoutJob.admit", lambda *_: None)
    monkeypatch.setattr(process_module, "decode_answer", decode_any_offer)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        await check_is_not_believed(lie)


@pytest.mark.parametrize(("dimensions", "is_taken"), [(16, True), (17, False)])
def test_a_shape_has_few_dimensions_S23(dimensions: int, is_taken: bool) -> None:
    """The product of a million of them takes the event loop for minutes."""
    body = msgspec.msgpack.encode(Made(0, "image", (TensorHead("pixels", "uint8", (1,) * dimensions),), ONE_TOKEN))
    with nullcontext() if is_taken else pytest.raises(ProtocolError):
        decode_answer(body, payload_bytes=1)


def test_no_size_in_an_answer_is_negative_S23() -> None:
    head = TensorHead("pixels", "uint8", (-1,))
    for wrong in (Made(0, "image", (head,), ONE_TOKEN), ClipPieces(0, 1, 1, (2, -1)), Tokens(0, 2, -1), Text(0, -1)):
        payload_bytes = max(wrong.payload_bytes, 0)
        with pytest.raises(ProtocolError, match="not an answer"):
            decode_answer(msgspec.msgpack.encode(wrong), payload_bytes=payload_bytes)
