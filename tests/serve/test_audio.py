"""Clips in chats, with the unmodified `openai` package: `semel serve` answers as bare vLLM's server does (issue 8)."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from tests.engine.parity import audio_part, clip, data_url, random_chat
from tests.serve.both import MODEL, Both, serving_both
from tests.serve.differences import comparable
from tests.sounds import recorded, spoken

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def both(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    with serving_both(tiny("qwen2-audio"), tmp_path_factory.mktemp("audio")) as made:
        yield made


def input_audio(data: bytes, kind: str) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": kind}}


def audio_url(data: bytes, kind: str) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": data_url(data, f"audio/{kind}")}}


def question(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is said?"}]}]


@pytest.mark.parametrize("part", [input_audio, audio_url])
@pytest.mark.parametrize("kind", ["wav", "flac", "m4a", "aac"])
def test_a_clip_is_heard_alike_field_by_field(both: Both, part: Callable[..., dict[str, Any]], kind: str) -> None:
    messages = question(part(recorded(spoken(np.random.default_rng(1), 3.3), kind), kind))
    body = {"return_token_ids": True}
    answer = both.chat(messages=messages, logprobs=True, top_logprobs=3, extra_body=body)
    assert answer.usage.prompt_tokens_details.multimodal_tokens["audio"] > 0
    both.stream(
        messages=messages, logprobs=True, top_logprobs=3, extra_body=body, stream_options={"include_usage": True}
    )


@pytest.mark.parametrize("kind", ["mp3", "ogg-vorbis"])
def test_a_clip_that_vllm_decodes_otherwise_by_rounding_is_heard_alike(both: Both, kind: str) -> None:
    messages = question(input_audio(recorded(spoken(np.random.default_rng(2), 3.3), kind), kind))
    assert both.chat(messages=messages).choices[0].message.content
    both.stream(messages=messages)


def test_several_clips_one_of_them_twice_are_heard_alike(both: Both) -> None:
    rng = np.random.default_rng(3)
    first, second = clip(rng), clip(rng)
    parts = [input_audio(first, "wav"), audio_url(second, "wav"), {**audio_url(first, "wav"), "uuid": "mine"}]
    both.chat(messages=question(*parts), temperature=1, seed=4, max_tokens=12)
    both.stream(messages=question(*parts), stream_options={"include_usage": True})


@pytest.mark.parametrize("part", [input_audio(b"no clip", "wav"), audio_url(b"", "wav")], ids=["noise", "nothing"])
def test_what_is_no_clip_is_refused_with_the_same_exception_S8(both: Both, part: dict[str, Any]) -> None:
    both.refuse(messages=question(part))
    assert both.served.ready()[0]


async def test_the_asynchronous_client_gets_the_same_sixteen_at_a_time(both: Both) -> None:
    rng = np.random.default_rng(0)
    chats: list[Any] = [random_chat(rng, [audio_part(clip(rng)) for _ in range(index % 4)]) for index in range(20)]
    answers = []
    for client in (both.ours, both.bare):
        room = asyncio.Semaphore(16)
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="none", max_retries=0, timeout=120) as asking:

            async def ask(chat: Any, asking: openai.AsyncOpenAI = asking, room: asyncio.Semaphore = room) -> Any:
                options: Any = {"temperature": 0, "max_tokens": 12, "logprobs": True, "top_logprobs": 3}
                body = {"ignore_eos": True, "return_token_ids": True}
                async with room:
                    answer = await asking.chat.completions.create(
                        model=MODEL, messages=chat, extra_body=body, **options
                    )
                return comparable(answer.model_dump(), cached=False)

            answers.append(await asyncio.gather(*map(ask, chats)))
    assert answers[0] == answers[1]
