"""Errors name the field or the part, say what is wrong in a sentence, and what to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from semel.core import Feature, Media
from semel.errors import MediaUndecodable
from semel.frontend.api.shared import faults
from tests.frontend.rig import Rig, rig
from tests.render.drawn import Drawing, image_part

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
BROKEN = 66
PYDANTIC = ("Input should", "should have", "Field required", "Extra inputs", "Value error", "valid list")


@pytest.fixture
async def broken(tmp_path: Path, drawing: Drawing) -> AsyncIterator[Rig]:
    """An application that cannot decode one image."""

    async def process(media: Media, options: Mapping[str, object], **_: object) -> Feature:
        if bytes(media.data) == str(BROKEN).encode():
            raise MediaUndecodable("the image (2 bytes) does not decode; send a complete PNG")
        return await drawing.process(media, options)

    async with rig(tmp_path, replace(drawing.pipeline, process=process)) as made:
        yield made


async def error_of(app: Rig, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    reply = await app.post(path, dict(body))
    assert 400 <= reply.status_code < 500, reply.text
    error: dict[str, Any] = reply.json()["error"]
    assert not [words for words in PYDANTIC if words in error["message"]]
    return error


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": HELLO, **fields}


FAULTS: Mapping[str, tuple[str, dict[str, Any], str | None, str]] = {
    "nothing": (CHAT, {}, "messages", "messages: is missing; send it"),
    "no messages": (CHAT, {"messages": []}, "messages", "messages: must have at least one entry"),
    "a message that is none": (CHAT, {"messages": [1]}, "messages[0]", "messages[0]: must be an object"),
    "a number": (CHAT, chat(temperature="warm"), "temperature", "temperature: must be a number"),
    "a whole number": (CHAT, chat(max_tokens=1.5), "max_tokens", "max_tokens: must be a whole number"),
    "too little": (CHAT, chat(n=0), "n", "n: must be at least 1"),
    "too much": (CHAT, chat(n=1_000_000), "n", "n: must be at most 128"),
    "a switch": (CHAT, chat(stream="perhaps"), "stream", "stream: must be true or false"),
    "a choice": (
        CHAT,
        chat(reasoning_effort="extreme"),
        "reasoning_effort",
        "reasoning_effort: must be 'none', 'minimal', 'low', 'medium', 'high', 'xhigh' or 'max'",
    ),
    "one of two types": (CHAT, chat(stop=1), "stop", "stop: must be a string, or a list"),
    "inside one of two types": (CHAT, chat(stop=["a", 1]), "stop[1]", "stop[1]: must be a string"),
    "many": (CHAT, chat(stop=["a"] * 17), "stop", "stop: must have at most 16 entries"),
    "an object": (CHAT, chat(stream=True, stream_options=1), "stream_options", "stream_options: must be an object"),
    "an unknown part of a field": (
        CHAT,
        chat(stream=True, stream_options={"x": 1}),
        "stream_options.x",
        "stream_options.x: unknown field; leave it out",
    ),
    "a tool": (
        CHAT,
        chat(tools=[{"type": "function", "function": {}}]),
        "tools[0].function.name",
        "tools[0].function.name: is missing; send it",
    ),
    "a part": (
        CHAT,
        {"messages": [*HELLO, {"role": "user", "content": ["?", {"type": "smell"}]}]},
        "messages[1].content[1]",
        "messages[1].content[1]: type 'smell' is not supported",
    ),
    "a prompt": ("/v1/completions", {"prompt": [[1, -1]]}, "prompt[0][1]", "prompt[0][1]: must be at least 0"),
    "a prompt of another type": ("/v1/completions", {"prompt": 1}, "prompt", "prompt: must be a string, or a list"),
    "tokens": ("/detokenize", {"tokens": ["a"]}, "tokens[0]", "tokens[0]: must be a whole number"),
    "a chat to be tokenized": ("/tokenize", {"messages": 1}, "messages", "messages: must be a list"),
    "sampling": (
        "/inference/v1/generate",
        {"token_ids": [1], "sampling_params": {"n": 0}},
        "sampling_params.n",
        "sampling_params.n: must be at least 1",
    ),
    "Responses": ("/v1/responses", {"input": 1}, "input", "input: must be a string, or a list"),
    "a translated field": (
        "/v1/responses",
        {"input": "hello", "text": {"format": {"type": "json_schema"}}},
        "text.format.name",
        "text.format.name: is missing; send it",
    ),
    "Messages": ("/v1/messages", {"messages": HELLO}, None, "max_tokens: is missing; send it"),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_an_error_names_the_field_and_says_what_is_wrong(app: Rig, name: str) -> None:
    path, body, param, message = FAULTS[name]
    error = await error_of(app, path, body)
    assert error["message"].startswith(message)
    assert error.get("param") == param


async def test_what_is_no_json_is_said_with_its_place(app: Rig) -> None:
    reply = await app.client.post(CHAT, content=b'{"messages": nothing}')
    assert reply.json()["error"]["message"] == "the body is no JSON: expected ident at line 1 column 15"
    reply = await app.client.post(CHAT, content=b"[]")
    assert reply.json()["error"]["message"] == "the body must be an object"


def test_mutant_without_its_own_sentences_pydantic_s_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_SENTENCES", {})
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(dict[str, int]).validate_python({"a": "b"})
    assert any(words in str(faults.fault_of(caught.value)) for words in PYDANTIC)


IMAGES = [image_part(1), image_part(BROKEN), image_part(BROKEN)]


@pytest.mark.parametrize("route", [CHAT, "/v1/chat/completions/render", "/tokenize"])
async def test_media_that_cannot_be_decoded_are_named_by_their_part(broken: Rig, route: str) -> None:
    messages = [*HELLO, {"role": "user", "content": IMAGES}]
    error = await error_of(broken, route, {"messages": messages})
    assert error["param"] == "messages[1].content[1]"
    assert error["message"].startswith("messages[1].content[1]: the image (2 bytes) does not decode")


async def test_each_request_names_its_own_part_of_an_item_that_they_share(broken: Rig) -> None:
    first = {"messages": [{"role": "user", "content": [image_part(BROKEN)]}]}
    second = {"messages": [*HELLO, {"role": "user", "content": [image_part(1), image_part(BROKEN)]}]}
    errors = await asyncio.gather(*(error_of(broken, CHAT, body) for body in (first, second)))
    assert [error["param"] for error in errors] == ["messages[0].content[0]", "messages[1].content[1]"]


async def test_media_in_other_apis_are_named_by_the_part_of_that_request(broken: Rig) -> None:
    url = image_part(BROKEN)["image_url"]["url"]
    item = {"role": "user", "content": [{"type": "input_text", "text": "?"}, {"type": "input_image", "image_url": url}]}
    error = await error_of(broken, "/v1/responses", {"input": [item]})
    assert error["param"] == "input[0].content[1]"
    data = url.partition(",")[2]
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": [image]}]}
    assert (await error_of(broken, "/v1/messages", body))["message"].startswith("messages[0].content[0]")


async def test_audio_to_a_vision_model_says_what_the_model_takes(app: Rig) -> None:
    audio = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    error = await error_of(app, CHAT, {"messages": [*HELLO, {"role": "user", "content": ["?", audio]}]})
    assert error["param"] == "messages[1].content[1]"
    assert error["message"] == "messages[1].content[1]: tiny takes no audio: send text and images"


async def test_the_first_image_that_is_too_many_is_named(app: Rig) -> None:
    messages = [{"role": "user", "content": [image_part(number) for number in range(10)]}]
    error = await error_of(app, CHAT, {"messages": messages})
    assert error["param"] == "messages[0].content[8]"
    assert "the prompt has 10 images; tiny takes 8" in error["message"]
    assert "--limit-mm-per-prompt" in error["message"]


async def test_a_url_that_is_not_fetched_is_named_by_its_part(app: Rig) -> None:
    part = {"type": "image_url", "image_url": {"url": "http://example.com/a.png"}}
    error = await error_of(app, CHAT, {"messages": [{"role": "user", "content": [part]}]})
    assert (error["param"], error["code"]) == ("messages[0].content[0]", "media_url_not_allowed")
