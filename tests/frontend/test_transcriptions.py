"""Clips written down: vLLM's prompts and shapes, forms within bounds, lengths by the head of a file."""

from __future__ import annotations

import io
import json
import math
import random
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from starlette.datastructures import Headers
from starlette.formparsers import MultiPartParser

from semel.errors import InvalidRequest
from semel.frontend.api.openai.transcription_response import Marks, segments
from semel.frontend.budget import Budget
from semel.frontend.limits import BudgetLimits
from semel.frontend.routes.transcriptions import LANGUAGES, decoder_text
from semel.media.duration import clip_seconds
from semel.web.multipart import read_form
from tests.frontend.asgi import Exchange, stream_of
from tests.frontend.hearing import ROUTE, TOKENIZER, Hearing, clip, hearing_rig, id_of, refusal, send, settled
from tests.frontend.rig import Rig


@pytest.fixture
def hearing() -> Hearing:
    return Hearing()


@pytest.fixture
async def speech(tmp_path: Path, hearing: Hearing, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    async with hearing_rig(tmp_path, hearing, monkeypatch) as made:
        yield made


@pytest.mark.parametrize("form", ["json", "text"])
async def test_a_clip_is_answered_in_vllm_s_shape(speech: Rig, hearing: Hearing, form: str) -> None:
    reply = await send(speech, language="en", model="tiny", response_format=form, temperature="0")
    assert reply.json() == {"text": "hello there", "usage": {"type": "duration", "seconds": 2}}
    assert hearing.begun() == ["<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"]
    (submission,) = hearing.asked
    assert submission.sampling == {"stream_interval": 16, "temperature": 0.0}
    assert submission.prompt.encoder_token_ids is not None
    assert settled(speech)


async def test_the_openai_package_sends_what_is_understood(speech: Rig) -> None:
    transport: Any = speech.client
    client = openai.AsyncOpenAI(api_key="none", base_url="http://frontend/v1", http_client=transport)
    answer = await client.audio.transcriptions.create(
        model="tiny", file=("clip.wav", clip()), language="en", temperature=0.2, prompt="you there"
    )
    assert answer.text == "hello there"
    verbose = await client.audio.transcriptions.create(
        model="tiny", file=clip(), response_format="verbose_json", timestamp_granularities=["segment"], language="en"
    )
    assert (verbose.duration, verbose.language, verbose.text) == (1.5, "en", "hello there")
    assert verbose.segments is not None
    assert [(one.start, one.end, one.avg_logprob) for one in verbose.segments] == [(0.0, 1.0, -0.75)]


async def test_a_language_that_is_not_told_is_asked_of_the_model(speech: Rig, hearing: Hearing) -> None:
    assert (await send(speech)).json()["text"] == "hello there"
    asked, _ = hearing.asked
    assert asked.sampling == {
        "stream_interval": 16,
        "max_tokens": 1,
        "temperature": 0.0,
        "allowed_token_ids": sorted(map(id_of, ("<|de|>", "<|en|>", "<|ja|>"))),
    }
    assert hearing.begun() == ["<|startoftranscript|>", "<|startoftranscript|><|de|><|transcribe|><|notimestamps|>"]


async def test_a_language_may_be_any_that_the_model_has_a_token_for(speech: Rig, hearing: Hearing) -> None:
    assert (await send(speech, language="haw")).status_code == 200
    assert "<|haw|>" in hearing.begun()[0]
    for wrong in ("xx", "english", "EN", "|>", ""):
        assert "language" in await refusal(speech, language=wrong)


async def test_a_prompt_goes_before_and_is_no_special_token_S14(speech: Rig, hearing: Hearing) -> None:
    await send(speech, language="en", prompt="you")
    (submission,) = hearing.asked
    assert submission.prompt.token_ids == TOKENIZER.encode(decoder_text("en", "you", times=False))
    naive = TOKENIZER.encode(decoder_text("en", "<|haw|>", times=False))
    assert id_of("<|haw|>") in naive
    assert "special token" in await refusal(speech, language="en", prompt="<|haw|>")


async def test_a_model_that_chats_does_not_transcribe(app: Rig) -> None:
    assert "does not transcribe" in await refusal(app)


async def test_what_is_not_known_is_refused_by_name(speech: Rig) -> None:
    for name, value in (
        *(("hotwords", "x"), ("response_format", "srt"), ("use_beam_search", "true"), ("temperature", "hot")),
        *(("timestamp_granularities[]", "word"), ("timestamp_granularities[]", "segment"), ("seed", "1.5")),
        *(("max_completion_tokens", "0"), ("stream_include_usage", "true")),
    ):
        assert name.removesuffix("[]") in await refusal(speech, None, language="en", **{name: value})
    assert "verbose_json" in await refusal(speech, response_format="verbose_json", stream="true")
    assert (await send(speech, model="gpt-5")).status_code == 404


async def test_a_stream_has_vllm_s_chunks(speech: Rig) -> None:
    reply = await send(speech, language="en", stream="true", stream_include_usage="true")
    *lines, done = reply.text.strip().split("\n\n")
    assert done == "data: [DONE]"
    first, last, closing = (json.loads(line.removeprefix("data: ")) for line in lines)
    assert first["object"] == "transcription.chunk"
    assert first["id"].startswith("transcribe-")
    assert first["choices"] == [{"delta": {"content": "hello"}}]
    assert last["choices"] == [{"delta": {"content": " there"}, "finish_reason": "stop", "stop_reason": None}]
    assert closing["usage"] == {"prompt_tokens": 4 + 150, "completion_tokens": 4, "total_tokens": 158}
    assert settled(speech)


@pytest.mark.slow
def test_segments_are_those_of_vllm() -> None:
    from vllm.entrypoints.speech_to_text.base.serving import SpeechToTextBaseServing
    from vllm.entrypoints.speech_to_text.transcription.protocol import TranscriptionSegment

    first, end = id_of("<|0.00|>"), id_of("<|endoftext|>")
    encode = SimpleNamespace(
        encode=lambda text, **_: TOKENIZER.encode(text),
        decode=lambda tokens: re.sub(r"<\|(\d+\.\d+)\|>", "", TOKENIZER.decode(tokens)),  # as Whisper's tokenizer does
        eos_token_id=end,
    )
    for tokens in (
        [1, 2, first + 50, end],
        [1, first + 10, first + 10, 2, 3, first + 99, end],
        [first, 1, 2, first + 7],
        [1, first + 5, 2, first + 9, first + 9, 3, first + 12, end],
        [1, 2, 3],
        [first + 3, first + 4, 1, first + 9, first + 9, end],
    ):
        logprobs = [{token: -0.25 * (place + 1)} for place, token in enumerate(tokens)]
        theirs = SpeechToTextBaseServing._get_verbose_segments(
            SimpleNamespace(tokenizer=encode),
            tuple(tokens),
            [{token: SimpleNamespace(logprob=value) for token, value in step.items()} for step in logprobs],
            SimpleNamespace(temperature=0.5),
            TranscriptionSegment,
        )
        ours = segments(tokens, logprobs, Marks(first, end), TOKENIZER.decode, 0.5)
        assert ours == [one.model_dump() for one in theirs]


def form(*parts: tuple[str, bytes], end: bytes = b"--b--\r\n") -> bytes:
    return (
        b"".join(
            f"--b\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + data + b"\r\n" for head, data in parts
        )
        + end
    )


FILE = ('name="file"; filename="x"', clip())


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (form(*[(f'name="f{number}"', b"") for number in range(65)]), "more than 64 parts"),
        (form(('name="prompt"', b"x" * 65_537)), "at most 65,536 bytes"),
        (form(FILE, FILE), "twice"),
        (form(('name="prompt"', b"x"), ('name="prompt"', b"y")), "twice"),
        (form(('x="file"', b"x")), "no name"),
        (form(('name="prompt"', b"\xff")), "UTF-8"),
        (form(FILE, end=b""), "no end"),
        (form(('name="' + "x" * 5_000 + '"', b"")), "no form"),
        (b"{}", "no form"),
        (b"", "no end"),
    ],
)
def test_a_form_out_of_bounds_is_refused_S4_S18(body: bytes, why: str) -> None:
    for kind in (bytes, bytearray):
        with pytest.raises(InvalidRequest, match=why):
            read_form(kind(body), "multipart/form-data; boundary=b")


async def test_a_naive_reader_takes_a_form_of_any_number_of_parts_S18() -> None:
    headers = Headers({"content-type": "multipart/form-data; boundary=b"})

    async def chunks() -> AsyncGenerator[bytes, None]:
        yield form(*[(f'name="f{number}"', b"x" * 65_537) for number in range(100)])

    assert len(await MultiPartParser(headers, chunks()).parse()) == 100


def test_a_file_comes_out_as_it_went_in() -> None:
    data = bytes(range(256)) * 300 + b"\r\n--not\r\n--"
    read = read_form(
        bytearray(form(('name="file"; filename="x"', data), ('name="t[]"', b"a"), ('name="t[]"', b"b"))),
        "multipart/form-data; boundary=b",
    )
    assert read.files == {"file": data}
    assert read.fields == {"t[]": ["a", "b"]}


async def test_a_clip_sent_as_text_or_not_at_all_is_refused(speech: Rig) -> None:
    reply = await speech.client.post(ROUTE, data={"file": "x"}, files={"other": b"x"})
    assert (reply.status_code, reply.json()["error"]["message"][:5]) == (400, "file:")
    assert (await speech.client.post(ROUTE, json={})).status_code == 400
    assert settled(speech)


async def test_a_clip_of_commas_is_no_json(speech: Rig) -> None:
    """The limit on values is for JSON; the naive reader would take a clip for a list of a million."""
    commas = clip(25, rate=48_000, fill=b",,")
    naive = await speech.client.post("/v1/chat/completions", content=commas)  # reads as JSON is read
    assert naive.status_code == 413
    room = 4 * len(commas)  # as values of JSON, they would take a hundred times as much
    speech.service.budget = Budget(BudgetLimits(max_request_bytes=room, max_bytes=room))
    assert (await send(speech, commas, language="en")).status_code == 200
    assert settled(speech)


async def test_an_endless_form_is_given_up_on_while_it_comes_S4(speech: Rig) -> None:
    speech.service.body = replace(speech.service.body, max_bytes=1_000_000)
    sent = []

    def endless() -> Iterator[bytes]:
        yield form(FILE, end=b"")
        while True:
            sent.append(65_536)
            yield b"x" * 65_536

    exchange = Exchange()
    await exchange.run(speech.app, ROUTE, stream_of(endless()), {"content-type": "multipart/form-data; boundary=b"})
    assert exchange.status == 413
    assert sum(sent) < 1_200_000
    assert settled(speech)


@pytest.mark.parametrize("kind", ["WAV", "FLAC"])
@pytest.mark.parametrize("rate", [8_000, 16_000, 44_100])
def test_the_length_is_the_one_that_a_decoder_finds(kind: str, rate: int) -> None:
    import numpy as np
    import soundfile

    for depth in ("PCM_16", "PCM_24"):
        buffer = io.BytesIO()
        soundfile.write(buffer, np.zeros((12_345, 2)), rate, format=kind, subtype=depth)
        assert clip_seconds(buffer.getvalue(), sampling_rate=rate) == 12_345 / rate
        assert clip_seconds(buffer.getvalue(), sampling_rate=rate + 1) is None


def test_a_wav_that_was_streamed_is_as_long_as_what_came() -> None:
    data = bytearray(clip(2))
    for size in (0, 0xFFFFFFFF):
        data[40:44] = size.to_bytes(4, "little")
        assert clip_seconds(bytes(data), sampling_rate=16_000) == 2


def test_a_broken_head_tells_some_length_or_none_and_nothing_else_happens() -> None:
    rng = random.Random(0)
    for _ in range(5_000):
        data = bytearray(clip(0.001))
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(44)] = rng.randrange(256)
        told = clip_seconds(bytes(data[: rng.randrange(60)]), sampling_rate=16_000)
        assert told is None or 0 <= told < math.inf


@pytest.mark.slow
def test_the_decoder_begins_and_languages_are_looked_for_as_in_vllm() -> None:
    from vllm.config.speech_to_text import SpeechToTextParams
    from vllm.model_executor.models.whisper import WhisperForConditionalGeneration as Whisper

    assert set(LANGUAGES) == Whisper.supported_languages.keys()
    for prompt in ("", "you there"):
        asked: Any = SimpleNamespace(sample_rate=16_000)
        params = SpeechToTextParams(None, asked, None, language="de", request_prompt=prompt)
        theirs = Whisper.get_generation_prompt(params)["decoder_prompt"]["prompt"]
        assert decoder_text("de", prompt, times=False) == ("<|startoftranscript|>" if prompt else "") + theirs
