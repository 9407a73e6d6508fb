"""Text completions over HTTP: OpenAI's shape, several prompts, streams."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pytest
from msgspec.structs import replace

from semel.core import Output, Prompt, Timeline
from semel.frontend.api.openai.chat_response import Head
from semel.frontend.api.openai.completion_response import CompletionResponse, Echo
from semel.frontend.api.shared.response_options import ResponseOptions
from semel.lab.testing.engine import EchoStream, echo
from semel.render import Pipeline
from semel.wire.zmq import listener as listener_module
from tests.frontend.rig import Rig, stalled_first_tokens

COMPLETIONS = "/v1/completions"
LOGPROBS = ResponseOptions(logprobs=True, top_logprobs=1)


def totals(answer: Mapping[str, Any]) -> tuple[int, int, int]:
    usage = answer["usage"]
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]


def choices(answer: Mapping[str, Any]) -> list[Any]:
    return list(answer["choices"])


async def expected(app: Rig, text: str) -> list[int]:
    tokens = (await app.ok("/tokenize", {"prompt": text}))["tokens"]
    return list(echo(Prompt(tokens, Timeline.decoder([]), ()), {}))


async def test_each_prompt_goes_on_by_itself_E2(app: Rig) -> None:
    answer = await app.ok(COMPLETIONS, {"prompt": ["hello", "there"], "return_token_ids": True, "model": "tiny"})
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["token_ids"] for choice in answer["choices"]] == [
        await expected(app, "hello"),
        await expected(app, "there"),
    ]
    assert all(choice["finish_reason"] == "stop" for choice in answer["choices"])
    prompts = sum(len(choice["prompt_token_ids"]) for choice in answer["choices"])
    assert totals(answer) == (prompts, 8, prompts + 8)


async def test_a_stream_brings_the_same_tokens_as_the_whole_answer(app: Rig) -> None:
    sent = {
        "prompt": ["hello", "there", "hello"],
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    response = await app.post(COMPLETIONS, sent)
    assert response.headers["content-type"].startswith("text/event-stream")
    *lines, last = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert last == "[DONE]"
    *chunks, usage = map(json.loads, lines)
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        tokens[choice["index"]] += choice["token_ids"]
    hello = await expected(app, "hello")
    assert tokens == {0: hello, 1: await expected(app, "there"), 2: hello}
    assert usage["usage"]["completion_tokens"] == 12
    assert usage["choices"] == []


async def test_no_prompt_waits_until_another_is_accepted(app: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine answers none before it has all of them, and an acceptance alone would come in an hour."""
    monkeypatch.setattr(listener_module, "_LAZY_S", 3_600.0)
    prompts = [f"hello {number}" for number in range(100)]
    outputs, has_all = EchoStream.__aiter__, asyncio.Event()

    async def answering(stream: EchoStream) -> AsyncIterator[Output]:
        if app.engine.submissions == len(prompts):
            has_all.set()
        await has_all.wait()
        async for output in outputs(stream):
            yield output

    monkeypatch.setattr(EchoStream, "__aiter__", answering)
    async with asyncio.timeout(10):
        answer = await app.ok(COMPLETIONS, {"prompt": prompts, "return_token_ids": True})
    assert [choice["token_ids"] for choice in choices(answer)] == [await expected(app, text) for text in prompts]


async def test_texts_of_one_call_become_tokens_one_at_a_time(app: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the memory for all of them would be charged at once, and refused."""
    encode, both = Pipeline.encode, threading.Barrier(2)
    met: list[int] = []

    def encoding(pipeline: Pipeline, text: str, **options: Any) -> list[int]:
        with suppress(threading.BrokenBarrierError):
            met.append(both.wait(0.2))
        return encode(pipeline, text, **options)

    monkeypatch.setattr(Pipeline, "encode", encoding)
    answer = await app.ok(COMPLETIONS, {"prompt": ["hello", "there", "you", "all"]})
    assert [choice["index"] for choice in choices(answer)] == [0, 1, 2, 3]
    assert met == []


async def test_a_prompt_that_cannot_be_executed_refuses_all_and_leaves_nothing_running(app: Rig) -> None:
    status, message = await app.refused(COMPLETIONS, {"prompt": ["hello", "<|image_pad|>"]})
    assert status == 400
    assert "leave <|image_pad|> out" in message
    with stalled_first_tokens():  # the others are accepted, or under way
        assert (await app.refused(COMPLETIONS, {"prompt": [*["hello"] * 9, "<|image_pad|>"]}))[1] == message
        assert app.worker._streams == {}
    status, message = await app.refused(COMPLETIONS, {"prompt": "hello", "suffix": "x"})
    assert (status, "suffix" in message) == (400, True)
    assert (await app.ok(COMPLETIONS, {"prompt": "hello"}))["choices"][0]["finish_reason"] == "stop"


WORDS = {1: "ab", 2: "c", 3: "def"}
HEAD = Head("cmpl-r", "tiny", "semel-0", created=0)


def decode(token_ids: Sequence[int]) -> str:
    return "".join(WORDS[token] for token in token_ids)


def output(index: int, token: int, finish: str | None = None) -> Output:
    return Output(index, WORDS[token], (token,), ({token: -0.5, 2: float("-inf")},), finish)


def continuing(
    *prompts: list[int], options: ResponseOptions = LOGPROBS, echo: Echo | None = None
) -> CompletionResponse:
    given = [Prompt(prompt, Timeline.decoder([]), ()) for prompt in prompts]
    return CompletionResponse(HEAD, given, decode, count=2, options=options, echo=echo)


def test_logprobs_are_four_parallel_lists_with_offsets_into_the_text() -> None:
    whole, streamed = continuing([7, 7], [8]), continuing([7, 7], [8])
    offsets = []
    for prompt, index, token in ((1, 0, 1), (0, 1, 3), (1, 0, 3), (1, 0, 1)):
        whole.add(prompt, output(index, token, "length"))
        (chunk,) = streamed.chunks(prompt, output(index, token))
        (piece,) = choices(chunk)
        offsets.append((piece["index"], piece["logprobs"]["text_offset"]))
    assert offsets == [(2, [0]), (1, [0]), (2, [2]), (2, [5])]
    answer = whole.whole()
    third = choices(answer)[2]
    assert third["text"] == "abdefab"
    assert third["logprobs"]["tokens"] == ["ab", "def", "ab"]
    assert third["logprobs"]["text_offset"] == [0, 2, 5]
    assert third["logprobs"]["token_logprobs"] == [-0.5] * 3
    assert third["logprobs"]["top_logprobs"][0] == {"ab": -0.5, "c": -9999.0}
    assert totals(answer) == (3, 4, 7)
    assert continuing([7], options=ResponseOptions()).whole()["choices"][1]["logprobs"] is None


def test_an_echo_begins_with_the_prompt_and_what_is_known_of_its_tokens() -> None:
    told = (None, {2: (-1.0, 3, "C"), 1: (float("-inf"), 1, "ab")})
    first = replace(output(0, 3, "stop"), prompt_logprobs=told)
    echoing = continuing([1, 2], echo=Echo(["abC"], alone=False))
    echoing.add(0, first)
    echoing.add(0, output(1, 1, "stop"))
    one, other = choices(echoing.whole())
    assert (one["text"], other["text"]) == ("abCdef", "abCab")
    assert one["logprobs"]["tokens"] == ["ab", "C", "def"]
    assert one["logprobs"]["token_logprobs"] == [None, -1.0, -0.5]
    assert one["logprobs"]["top_logprobs"][:2] == [None, {"C": -1.0, "ab": -9999.0}]
    assert one["prompt_logprobs"][1]["1"] == {"logprob": -9999.0, "rank": 1, "decoded_token": "ab"}
    alone = continuing([1, 2], echo=Echo(["abC"], alone=True))
    alone.add(0, first)
    begun, _ = choices(alone.whole())
    assert begun["text"] == "abC"
    assert begun["logprobs"]["tokens"] == ["ab", "C"]
