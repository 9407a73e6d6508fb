"""Clips cut by a real process of the pool: pieces are taken only if there is room for them (S5, S18)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

from semel.core import Media, Target
from semel.errors import MediaTooLarge, MediaUndecodable, ProtocolError
from semel.frontend.budget import Budget
from semel.frontend.limits import BudgetLimits
from semel.media import DecodeLimits, cut_audio
from semel.processing.pool.pipe import Heard, decode_answer, encode, pieces_of
from semel.processing.pool.pool import Pool
from tests.sounds import recorded, spoken

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
async def pool(tiny: Callable[[str], Path]) -> AsyncIterator[Pool]:
    pool = await Pool.start(tiny("whisper"), Target("float32"), spares=0, limits=DecodeLimits(max_audio_s=120))
    yield pool
    await pool.close()


def sound(seconds: float, kind: str = "mp3") -> Media:
    return Media("audio", recorded(spoken(np.random.default_rng(int(seconds)), seconds), kind))


def free(_: int) -> None:
    pass


async def test_a_clip_is_cut_there_as_it_would_be_here_and_each_piece_processed(pool: Pool) -> None:
    media, spent = sound(70), list[int]()
    made, decoded = pool.processed, pool.decoded
    pieces = await pool.cut(media, spent.append)
    here = cut_audio(media.data, DecodeLimits(), sampling_rate=16_000, max_s=30)
    assert (pieces.samples, pieces.sampling_rate) == (here.samples, 16_000)
    assert [bytes(file) for file in pieces.files] == list(here.files)
    assert spent == [sum(map(len, here.files))]
    assert pool.processed == made  # a piece is no feature
    assert pool.decoded == decoded + 1
    features = await asyncio.gather(*(pool.process(Media("audio", bytes(file))) for file in pieces.files))
    assert {feature.tensors["input_features"].shape[-1] for feature in features} == {3_000}


async def test_pieces_that_nobody_may_hold_stay_where_they_are_and_the_process_lives_S18(pool: Pool) -> None:
    """The control: what is not asked about is taken."""
    media = sound(100)
    (pid,) = pool.pids
    account = Budget(BudgetLimits(max_request_bytes=1_000_000)).open()
    account.take(len(media.data))
    for _ in range(3):
        with pytest.raises(MediaTooLarge, match="--max-request-media-bytes"):
            await pool.cut(media, account.take)
    assert account.charged == len(media.data)
    naive = await pool.cut(media, free)
    assert sum(map(len, naive.files)) > 6_000_000
    assert pool.pids == (pid,)


async def test_a_clip_that_is_too_long_or_none_is_the_client_s_fault_S5_S6(pool: Pool) -> None:
    with pytest.raises(MediaTooLarge, match="--max-audio-s"):
        await pool.cut(sound(121), free)
    with pytest.raises(MediaUndecodable):
        await pool.cut(Media("audio", b"no clip"), free)
    assert len((await pool.cut(sound(2), free)).files) == 1


async def test_a_caller_that_goes_away_leaves_the_frames_in_step(pool: Pool) -> None:
    leaving = asyncio.create_task(pool.cut(sound(60), free))
    await asyncio.sleep(0)
    leaving.cancel()
    assert len((await pool.cut(sound(40), free)).files) == 2


def test_an_answer_that_says_other_sizes_than_it_has_is_refused_S10() -> None:
    heard = Heard(0, 10, 16_000, (4, 6))
    body = encode(heard)[12:]
    decode_answer(body, payload_bytes=10)
    with pytest.raises(ProtocolError):
        decode_answer(body, payload_bytes=11)
    empty, backwards = Heard(0, 10, 16_000, ()), Heard(0, 10, 16_000, (8, -4))
    for nothing in (empty, backwards, Heard(0, 0, 16_000, (4,)), Heard(0, 1, 0, (4,))):
        with pytest.raises(ProtocolError):
            pieces_of(nothing, memoryview(bytes(4)))
