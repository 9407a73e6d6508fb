"""Transcription over the real engine: our route's answers against those of vLLM's own server code."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.parity import Rig, clip, running
from tests.frontend import rig as frontends

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ROUTE = "/v1/audio/transcriptions"
REQUESTS: list[dict[str, str]] = [
    {"language": "en"},
    {"language": "de", "response_format": "text"},
    {},
    {"language": "en", "prompt": "what is this"},
    {"language": "en", "max_completion_tokens": "7"},
    {"language": "en", "temperature": "0.7", "seed": "3", "top_k": "5", "max_completion_tokens": "30"},
    {"language": "fr", "response_format": "verbose_json", "max_completion_tokens": "40"},
]


@pytest.fixture(scope="module")
async def rig(tiny: Callable[[str], Path]) -> AsyncIterator[Rig]:
    async with running(tiny("whisper"), max_model_len=448) as started:
        yield started


@pytest.fixture
async def frontend(tmp_path: Path, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[frontends.Rig]:
    monkeypatch.setattr(frontends, "EchoEngine", lambda _: rig.engine)
    async with frontends.rig(tmp_path, rig.pipeline) as made:
        yield made


@pytest.fixture(scope="module")
def server(rig: Rig) -> Any:
    """What answers the route in vLLM's server, over the same engine."""
    from vllm.entrypoints.openai.models.protocol import BaseModelPath
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.entrypoints.speech_to_text.transcription.serving import OpenAIServingTranscription

    models = OpenAIServingModels(rig.llm, [BaseModelPath("tiny", str(rig.folder))])
    return OpenAIServingTranscription(rig.llm, models, request_logger=None)


async def theirs(server: Any, data: bytes, fields: dict[str, str]) -> Any:
    from fastapi import UploadFile
    from vllm.entrypoints.speech_to_text.transcription.protocol import TranscriptionRequest

    request = TranscriptionRequest.model_validate({**fields, "file": UploadFile(io.BytesIO(data))})
    return (await server.create_transcription(data, request)).model_dump()


@pytest.mark.parametrize("fields", REQUESTS, ids=str)
async def test_a_clip_is_answered_field_for_field_as_by_vllm(
    frontend: frontends.Rig, server: Any, fields: dict[str, str]
) -> None:
    rng = np.random.default_rng(len(fields))
    for _ in range(3):
        data = clip(rng)
        expected = await theirs(server, data, fields)
        reply = await frontend.client.post(ROUTE, data=fields, files={"file": ("clip.wav", data)})
        assert reply.status_code == 200, reply.text
        assert reply.json() == expected
    assert expected["text"] or fields.get("response_format") == "verbose_json"
