"""Clips written down over the real engine: our routes' answers against those of vLLM's own server code."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from semel.lab.bench.ports import free_port
from semel.media import DecodeLimits, decode_audio
from semel.media.decode.clip_cuts import wav_of
from semel.web.server import HttpServer
from tests.engine.engines import Engines
from tests.engine.families import FAMILIES
from tests.engine.parity import Rig, clip
from tests.frontend import rig as frontends
from tests.sounds import FORMATS, recorded, spoken
from tests.test_examples import run_example

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ROUTE = "/v1/audio/transcriptions"
TRANSLATIONS = "/v1/audio/translations"
BRIEF = {"max_completion_tokens": "24"}
REQUESTS: list[dict[str, str]] = [
    {"language": "en"},
    {"language": "de", "response_format": "text"},
    {},
    {"language": "en", "prompt": "what is this"},
    {"language": "en", "max_completion_tokens": "7"},
    {"language": "en", "temperature": "0.7", "seed": "3", "top_k": "5", "max_completion_tokens": "30"},
    {"language": "fr", "response_format": "verbose_json", "max_completion_tokens": "40"},
]
LONG: list[dict[str, str]] = [
    {"language": "en"},
    {},
    {"language": "ja"},
    {"language": "en", "prompt": "what is this", "temperature": "0.7", "seed": "3"},
    {"language": "fr", "response_format": "verbose_json"},
    {"response_format": "verbose_json", "timestamp_granularities[]": "segment"},
]
EXACT = ("wav", "wav-44k", "wav-8k", "flac", "flac-48k", "m4a", "aac")
"""What vLLM decodes to the same samples, to the last bit."""

CLOSE = ("mp3", "mp3-44k", "ogg-vorbis")
"""What it decodes with another library than FFmpeg: samples differ in the sixth digit."""

OTHERWISE = ("ogg-opus", "webm", "m4a-44k")
"""What it decodes to other samples: with the encoder's run-up of 6.5 ms and without the end (Ogg with Opus), without
the millisecond that a resampler holds back (WebM and M4A of another rate)."""


@pytest.fixture
async def rig(engines: Engines) -> Rig:
    return await engines.of(FAMILIES["whisper"].start)


@pytest.fixture
async def frontend(tmp_path: Path, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[frontends.Rig]:
    monkeypatch.setattr(frontends, "EchoEngine", lambda _: rig.engine)
    async with frontends.rig(tmp_path, rig.pipeline) as made:
        yield made


@pytest.fixture
def server(rig: Rig) -> Any:
    """What answers the routes in vLLM's server, over the same engine."""
    from vllm.entrypoints.openai.models.protocol import BaseModelPath
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.entrypoints.speech_to_text.transcription.serving import OpenAIServingTranscription
    from vllm.entrypoints.speech_to_text.translation.serving import OpenAIServingTranslation

    models = OpenAIServingModels(rig.llm, [BaseModelPath("tiny", str(rig.folder))])
    return {
        ROUTE: OpenAIServingTranscription(rig.llm, models, request_logger=None).create_transcription,
        TRANSLATIONS: OpenAIServingTranslation(rig.llm, models, request_logger=None).create_translation,
    }


async def theirs(server: Any, data: bytes, fields: dict[str, str], route: str = ROUTE) -> Any:
    from fastapi import UploadFile
    from vllm.entrypoints.speech_to_text.transcription.protocol import TranscriptionRequest
    from vllm.entrypoints.speech_to_text.translation.protocol import TranslationRequest

    kind: Any = TranscriptionRequest if route == ROUTE else TranslationRequest
    given: dict[str, Any] = {name: [value] if name.endswith("[]") else value for name, value in fields.items()}
    request = kind.model_validate({**given, "file": UploadFile(io.BytesIO(data))})
    answer = await server[route](data, request)
    return [event async for event in answer] if request.stream else answer.model_dump()


async def ours(frontend: frontends.Rig, data: bytes, fields: dict[str, str], route: str = ROUTE) -> Any:
    reply = await frontend.client.post(route, data=fields, files={"file": ("clip", data)}, timeout=120)
    assert reply.status_code == 200, reply.text
    return reply.text.split("\n\n") if fields.get("stream") else reply.json()


def joined(events: list[str]) -> dict[str, Any]:
    """What a stream says in all, however it is cut."""
    chunks = [json.loads(line) for line in _data(events) if line != "[DONE]"]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return {
        "content": "".join(choice["delta"]["content"] for choice in choices),
        "ends": [(one["finish_reason"], one["stop_reason"]) for one in choices if one.get("finish_reason")],
        "heads": {(chunk["object"], chunk["id"].split("-")[0]) for chunk in chunks},
        "usage": chunks[-1].get("usage"),
        "done": list(_data(events))[-1],
    }


def _data(events: list[str]) -> Iterator[str]:
    return (event.strip().removeprefix("data: ") for event in events if event.strip())


@pytest.mark.parametrize("fields", REQUESTS, ids=str)
async def test_a_clip_is_answered_field_for_field_as_by_vllm(
    frontend: frontends.Rig, server: Any, fields: dict[str, str]
) -> None:
    rng = np.random.default_rng(len(fields))
    for _ in range(3):
        data = clip(rng)
        expected = await theirs(server, data, fields)
        assert await ours(frontend, data, fields) == expected
    assert expected["text"] or fields.get("response_format") == "verbose_json"


@pytest.mark.parametrize("fields", LONG, ids=str)
@pytest.mark.parametrize("kind", ["wav", "flac-48k"])
async def test_a_long_clip_is_cut_where_vllm_cuts_it_and_answered_alike(
    frontend: frontends.Rig, server: Any, fields: dict[str, str], kind: str
) -> None:
    rng = np.random.default_rng(8)
    for seconds in (30.5, 75.3):
        data = recorded(spoken(rng, seconds, FORMATS[kind][2]), kind)
        expected = await theirs(server, data, {**fields, **BRIEF})
        assert await ours(frontend, data, {**fields, **BRIEF}) == expected
    assert expected["text"] or fields.get("response_format") == "verbose_json"


async def test_the_segments_of_a_long_clip_go_on_in_time(frontend: frontends.Rig, server: Any) -> None:
    """The control: segments of the later pieces alone begin at 0."""
    fields = {"language": "en", "response_format": "verbose_json", "temperature": "1", "max_completion_tokens": "440"}
    data = recorded(spoken(np.random.default_rng(1), 65), "wav")
    for seed in range(8):
        answer = await ours(frontend, data, {**fields, "seed": str(seed)})
        assert answer == await theirs(server, data, {**fields, "seed": str(seed)})
        if any(segment["seek"] for segment in answer["segments"]):
            return
    pytest.fail("no later piece had a segment")


@pytest.mark.parametrize("kind", EXACT)
async def test_a_format_is_answered_field_for_field_as_by_vllm(frontend: frontends.Rig, server: Any, kind: str) -> None:
    rng = np.random.default_rng(4)
    for seconds in (3.21, 33.7):
        data = recorded(spoken(rng, seconds, FORMATS[kind][2]), kind)
        for form in ("json", "verbose_json"):
            fields = {"language": "en", "response_format": form, **BRIEF}
            assert await ours(frontend, data, fields) == await theirs(server, data, fields)


@pytest.mark.parametrize("kind", CLOSE)
async def test_a_format_that_vllm_decodes_otherwise_by_rounding_is_answered_alike(
    frontend: frontends.Rig, server: Any, kind: str
) -> None:
    rng = np.random.default_rng(5)
    for seconds in (3.21, 33.7):
        data = recorded(spoken(rng, seconds, FORMATS[kind][2]), kind)
        fields = {"language": "en", **BRIEF}
        assert await ours(frontend, data, fields) == await theirs(server, data, fields)
        fields["response_format"] = "verbose_json"
        mine, bare = await ours(frontend, data, fields), await theirs(server, data, fields)
        for answer in (mine, bare):
            for segment in answer["segments"]:
                segment["avg_logprob"] = pytest.approx(segment["avg_logprob"], abs=1e-3)
        assert mine == bare


@pytest.mark.parametrize("kind", OTHERWISE)
async def test_a_format_that_vllm_decodes_to_other_samples_is_answered_as_its_samples_are(
    frontend: frontends.Rig, server: Any, kind: str
) -> None:
    """Bare vLLM is given what FFmpeg decodes, as it is. Given the file, it tells the same length to 10 ms."""
    rng = np.random.default_rng(6)
    for seconds in (3.21, 33.7):
        data = recorded(spoken(rng, seconds, FORMATS[kind][2]), kind)
        plain = wav_of(decode_audio(data, DecodeLimits(), sampling_rate=16_000), 16_000)
        fields = {"language": "en", "response_format": "verbose_json", **BRIEF}
        mine = await ours(frontend, data, fields)
        assert mine == await theirs(server, plain, fields)
        assert mine["duration"] == pytest.approx((await theirs(server, data, fields))["duration"], abs=0.01)


@pytest.mark.parametrize("seconds", [2.5, 64.0])
@pytest.mark.parametrize("options", [{}, {"stream_include_usage": "true"}, {"stream_continuous_usage_stats": "true"}])
@pytest.mark.parametrize("route", [ROUTE, TRANSLATIONS])
async def test_a_stream_says_the_same_with_the_same_usage(
    frontend: frontends.Rig, server: Any, seconds: float, options: dict[str, str], route: str
) -> None:
    data = recorded(spoken(np.random.default_rng(7), seconds), "wav")
    fields = {"language": "en", "stream": "true", **BRIEF, **options}
    expected = joined(await theirs(server, data, fields, route))
    assert joined(await ours(frontend, data, fields, route)) == expected
    assert expected["content"]
    assert len(expected["ends"]) == (1 if seconds < 30 else 3)


@pytest.mark.parametrize("fields", [{}, {"language": "de", "to_language": "en"}, {"response_format": "verbose_json"}])
async def test_a_clip_is_translated_as_by_vllm(frontend: frontends.Rig, server: Any, fields: dict[str, str]) -> None:
    rng = np.random.default_rng(9)
    for seconds in (2.5, 40.0):
        data = recorded(spoken(rng, seconds), "wav")
        expected = await theirs(server, data, {**fields, **BRIEF}, TRANSLATIONS)
        assert await ours(frontend, data, {**fields, **BRIEF}, TRANSLATIONS) == expected


async def test_many_clips_are_transcribed_by_the_example_and_one_that_is_none_does_not_stop_them(
    frontend: frontends.Rig, tmp_path: Path
) -> None:
    rng = np.random.default_rng(2)
    clips = [tmp_path / f"{number}.wav" for number in range(6)]
    for path in clips:
        path.write_bytes(clip(rng))
    broken = tmp_path / "broken.wav"
    broken.write_bytes(b"no clip at all")
    port = free_port()
    async with HttpServer(frontend.app, "127.0.0.1", port).running():
        arguments = (*clips, broken, "--url", f"http://127.0.0.1:{port}", "--at-once", 3)
        printed = await asyncio.to_thread(run_example, "transcribe.py", *arguments)
    told = {line["file"]: line for line in map(json.loads, printed.splitlines())}
    assert set(told) == {path.name for path in [*clips, broken]}
    assert all("text" in told[path.name] for path in clips)
    assert "error" in told["broken.wav"]
