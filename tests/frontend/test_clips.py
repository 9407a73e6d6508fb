"""Clips of any format and length: decoded and cut by the pool, heard piece by piece, within limits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from semel.core import Output, Submission
from semel.errors import MediaTooLarge
from semel.frontend.budget import Account, Budget
from semel.frontend.items.clips import PIECES_AT_ONCE, Chain
from semel.frontend.limits import BudgetLimits
from semel.media import DecodeLimits
from tests.frontend.hearing import ROUTE, Hearing, Spoken, clip, hearing_rig, refusal, send, settled
from tests.frontend.rig import Rig
from tests.sounds import FORMATS, recorded, spoken
from tests.waiting import until

TRANSLATIONS = "/v1/audio/translations"


@pytest.fixture
def hearing() -> Hearing:
    return Hearing()


@pytest.fixture
async def speech(tmp_path: Path, hearing: Hearing, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    async with hearing_rig(tmp_path, hearing, monkeypatch, DecodeLimits(max_audio_s=300)) as made:
        yield made


def sound(seconds: float, kind: str = "wav") -> bytes:
    return recorded(spoken(np.random.default_rng(3), seconds, FORMATS[kind][2]), kind)


@pytest.mark.parametrize("kind", FORMATS)
async def test_a_clip_of_any_format_is_heard_and_its_length_told(speech: Rig, hearing: Hearing, kind: str) -> None:
    reply = await send(speech, sound(2.5, kind), language="en", response_format="verbose_json")
    assert reply.status_code == 200, reply.text
    assert reply.json()["duration"] == pytest.approx(2.5, abs=0.13)  # AAC: up to two frames more
    assert len(hearing.asked) == 1
    assert settled(speech)


@pytest.mark.parametrize(("seconds", "pieces"), [(30, 1), (30.1, 2), (75, 3), (295, 11)])
async def test_a_long_clip_is_heard_in_pieces_and_its_texts_are_joined(
    speech: Rig, hearing: Hearing, seconds: float, pieces: int
) -> None:
    reply = await send(speech, clip(seconds), language="en")
    assert reply.json() == {
        "text": " ".join(["hello there"] * pieces),
        "usage": {"type": "duration", "seconds": int(-(-seconds // 1))},
    }
    assert len(hearing.asked) == pieces
    assert len({one.request_id for one in hearing.asked}) == pieces
    assert settled(speech)


async def test_the_first_piece_tells_the_language_of_all(speech: Rig, hearing: Hearing) -> None:
    await send(speech, clip(70))
    assert hearing.begun()[0] == "<|startoftranscript|>"
    assert hearing.begun()[1:] == ["<|startoftranscript|><|de|><|transcribe|><|notimestamps|>"] * 3


async def test_segments_of_later_pieces_begin_where_their_piece_does(speech: Rig) -> None:
    verbose = (await send(speech, clip(65), language="en", response_format="verbose_json")).json()
    begins = [segment["start"] for segment in verbose["segments"]]
    assert begins[0] == 0
    assert begins == [pytest.approx(29.0 * place) for place in range(3)]  # all is equally quiet: cut at the first
    assert [segment["seek"] for segment in verbose["segments"]] == [0, 29, 58]
    assert [segment["end"] - segment["start"] for segment in verbose["segments"]] == [pytest.approx(1.0)] * 3


async def test_a_stream_separates_pieces_and_counts_all_of_them(speech: Rig) -> None:
    reply = await send(speech, clip(65), language="en", stream="true", stream_include_usage="true")
    *lines, done = reply.text.strip().split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert done == "data: [DONE]"
    assert [choice["delta"]["content"] for chunk in chunks for choice in chunk["choices"]] == [
        *("hello", " there", " hello", " there", " hello", " there")
    ]
    assert chunks[-1]["usage"] == {"prompt_tokens": 4 + 6_500, "completion_tokens": 12, "total_tokens": 6_516}
    assert settled(speech)


async def test_a_clip_is_translated_in_vllm_s_shape(speech: Rig, hearing: Hearing) -> None:
    files = {"file": ("clip.wav", clip(40))}
    reply = await speech.client.post(TRANSLATIONS, data={"language": "de", "to_language": "en"}, files=files)
    assert reply.json() == {"text": "hello there hello there"}
    assert set(hearing.begun()) == {"<|startoftranscript|><|de|><|translate|><|notimestamps|>"}
    streamed = await speech.client.post(TRANSLATIONS, data={"language": "de", "stream": "true"}, files=files)
    first = json.loads(streamed.text.split("\n\n")[0].removeprefix("data: "))
    assert (first["object"], first["id"][:10]) == ("translation.chunk", "translate-")
    for name, value in (("to_language", "fr"), ("timestamp_granularities[]", "segment")):
        refused = await speech.client.post(TRANSLATIONS, data={name: value}, files=files)
        assert refused.status_code == 400
        assert name in refused.json()["error"]["message"]


@pytest.mark.parametrize("data", [b"ID3\3" + bytes(99), b"OggS" + bytes(99), b"RIFF", b"x"])
async def test_what_does_not_decode_is_refused_S6(speech: Rig, hearing: Hearing, data: bytes) -> None:
    assert "does not decode" in await refusal(speech, data, language="en")
    assert not hearing.asked
    assert settled(speech)


@pytest.mark.slow
async def test_a_clip_over_the_length_is_refused_and_the_flag_named_S5(speech: Rig, hearing: Hearing) -> None:
    for data in (clip(301), sound(301, "ogg-opus")):
        reply = await send(speech, data, language="en")
        assert reply.status_code == 413
        assert "--max-audio-s" in reply.json()["error"]["message"]
    assert not hearing.asked
    assert settled(speech)


@pytest.mark.slow
async def test_a_small_file_whose_samples_are_many_is_refused_by_what_its_samples_take_S5_S18(
    speech: Rig, hearing: Hearing
) -> None:
    """The control: by the bytes that came, which is all that a naive account sees, it is within the limit."""
    silence = recorded(np.zeros(48_000 * 280, np.float32), "ogg-opus")
    limits = BudgetLimits(max_request_bytes=4_000_000, max_bytes=8_000_000)
    speech.service.budget = Budget(limits)
    assert 3 * len(silence) < limits.max_request_bytes
    reply = await send(speech, silence, language="en")
    assert reply.status_code == 413
    assert "--max-request-media-bytes" in reply.json()["error"]["message"]
    assert not hearing.asked
    assert settled(speech)


async def test_few_pieces_of_one_clip_are_asked_for_at_once_S18(
    speech: Rig, hearing: Hearing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: all that the clip has would be asked for, eleven."""
    go_on, answer = asyncio.Event(), hearing.submit

    async def late(submission: Submission) -> Any:
        said = await answer(submission)

        class Late(Spoken):
            async def __aiter__(self) -> AsyncIterator[Output]:
                await go_on.wait()
                async for output in said:
                    yield output

        return Late([])

    monkeypatch.setattr(speech.engine, "submit", late)
    asking = asyncio.create_task(send(speech, clip(295), language="en"))
    await until(lambda: len(hearing.asked) == PIECES_AT_ONCE)
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(hearing.asked) == PIECES_AT_ONCE < 11
    go_on.set()
    assert (await asking).json()["text"] == " ".join(["hello there"] * 11)
    assert len(hearing.asked) == 11
    assert settled(speech)


async def test_pieces_are_answered_in_their_order_whichever_is_ready_first() -> None:
    ready = [asyncio.Event() for _ in range(3)]

    async def ask(index: int) -> Spoken:
        await ready[index].wait()
        return Spoken([Output(0, str(index), (1,), finish_reason="stop")])

    account = Budget().open()
    chain = Chain(3, ask, account)
    ready[0].set()
    await chain.begin()
    for index in (2, 1):
        ready[index].set()
    assert [output.text async for output in chain] == ["0", "1", "2"]
    await chain.close()


@pytest.mark.parametrize("failing", [0, 1, 2])
async def test_a_piece_that_fails_fails_the_clip_and_closes_the_others(failing: int) -> None:
    closed: list[int] = []

    class Closing(Spoken):
        def __init__(self, index: int) -> None:
            super().__init__([Output(0, str(index), (1,), finish_reason="stop")])
            self.index = index

        async def close(self) -> None:
            closed.append(self.index)

    async def ask(index: int) -> Spoken:
        if index == failing:
            raise MediaTooLarge("a piece too far")
        return Closing(index)

    budget = Budget()
    account: Account = budget.open()
    account.take(100)
    chain = Chain(3, ask, account)
    said: list[str] = []
    with pytest.raises(MediaTooLarge, match="too far"):
        await chain.begin()
        async for output in chain:
            said += [output.text]
    await chain.close()
    assert said == [str(index) for index in range(failing)]
    assert sorted(set(closed)) == [index for index in range(3) if index != failing]
    assert (budget.in_flight, budget.requests) == (0, 0)


async def test_a_client_that_goes_away_leaves_nothing_behind_S18(speech: Rig, hearing: Hearing) -> None:
    async with speech.client.stream(
        "POST", ROUTE, data={"language": "en", "stream": "true"}, files={"file": ("clip.wav", clip(290))}
    ) as reply:
        async for _ in reply.aiter_lines():
            break
    await until(lambda: settled(speech))
    assert hearing.asked
