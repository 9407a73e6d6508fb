"""The Messages API as Anthropic's own client sees it: whole, streamed, with tools, images and errors."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import ErrorResponse, Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from semel.frontend.limits import BodyLimits
from semel.render import ChatRenderer
from tests.frontend.agents import CALLS, KEY, Agents, Answer, agents

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
PIXELS = base64.b64encode(b"7").decode()
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXELS}}
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
LOOK = {"name": "look", "description": "see", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
GO = {"name": "go", "input_schema": {"type": "object"}, "strict": True, "type": "custom"}
HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, parts_renderer: ChatRenderer) -> Iterator[Agents]:
    with agents(tmp_path_factory.mktemp("messages"), parts_renderer) as made:
        yield made


@pytest.fixture
def client(server: Agents) -> Iterator[anthropic.Anthropic]:
    server.answer = Answer(content="hello there")
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=60) as made:
        yield made


def post(server: Agents, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, headers={"x-api-key": KEY, **headers}, timeout=60)


def raw(server: Agents, **fields: Any) -> Any:
    """An answer in JSON; it must be what the client's types say, strictly."""
    reply = post(server, "/v1/messages", {"messages": HELLO, "max_tokens": 8} | fields)
    assert reply.status_code == 200, reply.text
    Message.model_validate(reply.json(), strict=True)
    return reply.json()


def events(server: Agents, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, each of which must be what the client's types say."""
    reply = post(server, "/v1/messages", {"messages": HELLO, "max_tokens": 8, "stream": True} | fields)
    assert reply.status_code == 200, reply.text
    found = []
    for block in reply.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append(TypeAdapter(dict[str, Any]).validate_json(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        kind = ErrorResponse if found[-1]["type"] == "error" else None
        EVENT.validate_python(found[-1], strict=True) if kind is None else kind.model_validate(found[-1], strict=True)
    return found


def test_text_comes_whole(server: Agents, client: anthropic.Anthropic) -> None:
    answer = client.messages.create(model="tiny", max_tokens=8, messages=HELLO, system="be kind")
    (block,) = answer.content
    assert block.type == "text"
    assert (block.text, answer.stop_reason, answer.role, answer.model) == (
        "hello there",
        "end_turn",
        "assistant",
        "tiny",
    )
    assert answer.usage.cache_read_input_tokens == 2
    assert answer.usage.input_tokens + 2 == len(server.submission.prompt.token_ids)
    assert "be kind" in server.prompt()


def test_what_the_client_asks_for_is_what_the_engine_is_asked_for(server: Agents, client: anthropic.Anthropic) -> None:
    config: Any = {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}}
    client.messages.create(
        model="tiny",
        max_tokens=2_000,
        messages=HELLO,
        extra_body={"temperature": 0.5, "top_p": 0.25, "top_k": 4},
        stop_sequences=["x", "y"],
        metadata={"user_id": "u"},
        thinking={"type": "enabled", "budget_tokens": 1_024},
        output_config=config,
    )
    sampling, parsing = server.submission.sampling, server.submission.parsing
    assert parsing is not None
    expected = {"max_tokens": 2_000, "temperature": 0.5, "top_p": 0.25, "top_k": 4, "stop": ["x", "y"]}
    assert {name: sampling[name] for name in expected} == expected
    assert sampling["thinking_token_budget"] == 1_024
    assert parsing.reasoning_effort == "low"
    assert parsing.response_format == {
        "type": "json_schema",
        "json_schema": {"name": "json_schema", "schema": SCHEMA},
    }
    raw(server, thinking={"type": "disabled"}, output_config={"effort": "low"})
    parsing = server.submission.parsing
    assert parsing is not None
    assert parsing.reasoning_effort == "none"


def test_images_are_seen_in_messages_and_in_the_results_of_tools(server: Agents, client: anthropic.Anthropic) -> None:
    call = {"type": "tool_use", "id": "c", "name": "look", "input": {"at": "x"}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "see"}, IMAGE]}
    messages: Any = [
        {"role": "user", "content": [IMAGE, {"type": "text", "text": "look"}]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, {"type": "text", "text": "well?"}]},
    ]
    assert client.messages.create(model="tiny", max_tokens=8, messages=messages).stop_reason == "end_turn"
    assert len(server.submission.prompt.items) == 2


def test_the_base64_of_images_is_no_text_to_parse(server: Agents, client: anthropic.Anthropic) -> None:
    """Control: as many characters of text are too many."""
    long = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(b"7".rjust(300_000)).decode()}
    image = {"type": "image", "source": long}
    call = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [image]}
    messages: Any = [
        {"role": "user", "content": [image]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    with server.limited(BodyLimits(max_text_bytes=100_000)):
        assert client.messages.create(model="tiny", max_tokens=8, messages=messages).stop_reason == "end_turn"
        assert len(server.submission.prompt.items) == 2
        messages[0]["content"] = "x" * 400_000
        with pytest.raises(anthropic.APIStatusError, match="--max-body-text-bytes") as caught:
            client.messages.create(model="tiny", max_tokens=8, messages=messages)
    assert caught.value.status_code == 413


def test_calls_of_tools_come_whole_and_go_back(server: Agents, client: anthropic.Anthropic) -> None:
    server.answer = Answer("hm", "I look.", CALLS, "tool_calls")
    tools: Any = [LOOK, GO]
    answer = client.messages.create(model="tiny", max_tokens=8, messages=HELLO, tools=tools)
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
    found = [(one.id, one.name, one.input) for one in answer.content if one.type == "tool_use"]
    assert found == [("call-a", "look", {"at": "né"}), ("call-b", "go", {"far": [1, 2.5]})]
    assert answer.stop_reason == "tool_use"
    results: Any = [{"type": "tool_result", "tool_use_id": one, "content": "done"} for one in ("call-a", "call-b")]
    server.answer = Answer(content="good")
    messages: Any = [*HELLO, {"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    again = client.messages.create(model="tiny", max_tokens=8, messages=messages, tools=tools)
    assert again.stop_reason == "end_turn"
    assert "I look." in server.prompt()


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "go"}, {"type": "function", "function": {"name": "go"}}),
    ],
)
def test_the_choice_of_a_tool_is_the_chat_s(server: Agents, choice: dict[str, Any], expected: object) -> None:
    raw(server, tools=[LOOK, GO], tool_choice={**choice, "disable_parallel_tool_use": True})
    parsing = server.submission.parsing
    assert parsing is not None
    assert (parsing.tool_choice, parsing.parallel_tool_calls) == (expected, False)


ANSWERS = {
    "text": Answer(content="hello there"),
    "nothing": Answer(),
    "thinking": Answer("let me think", "42"),
    "calls": Answer("hm", "I look.", CALLS, "tool_calls"),
    "a named call": Answer(calls=CALLS[:1], finish="stop"),
    "cut": Answer("hm", "hello th", (), "length"),
    "stopped": Answer(content="hello", stop="x"),
    "a cut call": Answer(
        calls=({**CALLS[0], "function": {"name": "look", "arguments": '{"at": "ne'}},), finish="length"
    ),
}


@pytest.mark.parametrize("kind", ANSWERS)
async def test_the_client_s_own_stream_makes_the_same_answer(server: Agents, kind: str) -> None:
    server.answer = ANSWERS[kind]
    whole = raw(server, tools=[LOOK, GO])
    tools: Any = [LOOK, GO]
    async with (
        anthropic.AsyncAnthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=60) as client,
        client.messages.stream(model="tiny", max_tokens=8, messages=HELLO, tools=tools) as stream,
    ):
        final = await stream.get_final_message()
    made = final.model_dump(mode="json", exclude_unset=True)
    assert (made["stop_reason"], made["stop_sequence"]) == (whole["stop_reason"], whole["stop_sequence"])
    assert [block["type"] for block in made["content"]] == [block["type"] for block in whole["content"]]
    for block, expected in zip(made["content"], whole["content"], strict=True):
        assert {name: block[name] for name in expected if name in block} == {
            name: value for name, value in expected.items() if name in block
        }


def test_an_error_in_a_stream_ends_it_with_an_event_of_its_own(server: Agents, client: anthropic.Anthropic) -> None:
    server.answer = Answer(content="hello", fails=True)
    assert events(server)[-1] == {
        "type": "error",
        "error": {"type": "api_error", "message": "the engine failed the request, as asked", "code": "engine_failed"},
    }
    with pytest.raises(anthropic.APIStatusError, match="as asked"):
        list(client.messages.create(model="tiny", max_tokens=8, messages=HELLO, stream=True))


@pytest.mark.parametrize(
    ("fields", "place", "words"),
    [
        ({"container": "c"}, "container", "not supported"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", "not supported"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]", "that the client runs"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "send tools"),
        ({"tool_choice": {"type": "tool"}, "tools": [LOOK]}, "tool_choice.name", "must be a string"),
        ({"messages": []}, "messages", "at least one entry"),
        ({"messages": [{"role": "bot", "content": ""}]}, "messages[0].role", "must be one of"),
        ({"messages": [{"role": "user", "content": [{"type": "thing"}]}]}, "messages[0].content[0]", "thing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]},
            "messages[0].content[0]",
            'must have a "file_id"',
        ),
        (
            {
                "system": "x",
                "messages": [{"role": "user", "content": [{**IMAGE, "source": {"type": "base64", "data": "?"}}]}],
            },
            "messages[0].content[0]",
            "base64",
        ),
        (
            {"messages": [{"role": "user", "content": [{**IMAGE, "source": {"type": "url", "url": "http://x.y/z"}}]}]},
            "messages[0].content[0]",
            "",
        ),
        ({"max_tokens": 0}, "max_tokens", "must be at least 1"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"tempurature": 1}, "tempurature", ""),
    ],
)
def test_what_is_refused_is_named_in_the_shape_of_this_api(
    server: Agents, fields: dict[str, Any], place: str, words: str
) -> None:
    reply = post(server, "/v1/messages", {"messages": HELLO, "max_tokens": 8} | fields)
    ErrorResponse.model_validate(reply.json(), strict=True)
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["message"].startswith(place)
    assert words in error["message"]


def test_every_error_has_the_shape_of_this_api(server: Agents, client: anthropic.Anthropic) -> None:
    """Control: elsewhere it is OpenAI's."""
    with pytest.raises(anthropic.NotFoundError, match="is not served here"):
        client.messages.create(model="gpt-5", max_tokens=8, messages=HELLO)
    with pytest.raises(anthropic.AuthenticationError), anthropic.Anthropic(base_url=server.url, api_key="x") as other:
        other.messages.create(model="tiny", max_tokens=8, messages=HELLO)
    wrong = httpx.get(f"{server.url}/v1/messages", headers={"x-api-key": KEY}, timeout=60)
    batch = httpx.post(f"{server.url}/v1/messages/batches", headers={"x-api-key": KEY}, timeout=60)
    broken = httpx.post(f"{server.url}/v1/messages", content=b"{", headers={"x-api-key": KEY}, timeout=60)
    for reply, status in ((wrong, 405), (batch, 404), (broken, 400)):
        assert reply.status_code == status
        ErrorResponse.model_validate(reply.json(), strict=True)
    other_api = httpx.get(f"{server.url}/v1/chat/completions", headers={"x-api-key": KEY}, timeout=60)
    assert other_api.json().keys() == {"error"}


def test_tokens_are_counted_without_an_answer(server: Agents, client: anthropic.Anthropic) -> None:
    server.last = None
    messages: Any = [{"role": "user", "content": [IMAGE, {"type": "text", "text": "look"}]}]
    tools: Any = [LOOK]
    counted = client.messages.count_tokens(model="tiny", messages=messages, system="be kind", tools=tools)
    assert server.last is None
    client.messages.create(model="tiny", max_tokens=8, messages=messages, system="be kind", tools=tools)
    assert counted.input_tokens == len(server.submission.prompt.token_ids)


def test_the_answer_goes_on_with_what_the_client_put_into_the_assistant_s_mouth(server: Agents) -> None:
    raw(server, messages=[*HELLO, {"role": "assistant", "content": "Once upon"}])
    assert server.prompt().endswith("Once upon")
    raw(server, messages=[*HELLO, {"role": "assistant", "content": "Once upon"}, *HELLO])
    assert not server.prompt().endswith("Once upon")


def test_a_header_that_differs_in_each_request_is_left_out_of_the_system_prompt(server: Agents) -> None:
    blocks = [
        {"type": "text", "text": "x-anthropic-billing-header: 1"},
        {"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}},
    ]
    raw(server, system=blocks)
    assert "be kind" in server.prompt()
    assert "billing" not in server.prompt()
