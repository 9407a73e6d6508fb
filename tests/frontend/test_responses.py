"""The Responses API as OpenAI's own client sees it: whole, streamed, with tools, images and errors."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from semel.render import ChatRenderer
from tests.frontend.agents import CALLS, KEY, Agents, Answer, agents

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
PIXELS = base64.b64encode(b"7").decode()
IMAGE = {"type": "input_image", "image_url": f"data:image/png;base64,{PIXELS}", "detail": "auto"}
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
GO = {"type": "function", "name": "go", "description": "walk", "strict": True, "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, parts_renderer: ChatRenderer) -> Iterator[Agents]:
    with agents(tmp_path_factory.mktemp("responses"), parts_renderer) as made:
        yield made


@pytest.fixture
def client(server: Agents) -> Iterator[openai.OpenAI]:
    server.answer = Answer(content="hello there")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60) as made:
        yield made


def raw(server: Agents, body: dict[str, Any]) -> Any:
    """An answer in JSON; it must be what the client's types say, strictly."""
    reply = httpx.post(f"{server.url}/v1/responses", json=body, headers={"x-api-key": KEY}, timeout=60)
    assert reply.status_code == 200, reply.text
    Response.model_validate(reply.json(), strict=True)
    return reply.json()


def events(server: Agents, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, each of which must be what the client's types say."""
    reply = httpx.post(
        f"{server.url}/v1/responses", json=body | {"stream": True}, headers={"x-api-key": KEY}, timeout=60
    )
    assert reply.status_code == 200, reply.text
    found = []
    for block in reply.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append(TypeAdapter(dict[str, Any]).validate_json(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        EVENT.validate_python(found[-1], strict=True)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def test_text_comes_whole(server: Agents, client: openai.OpenAI) -> None:
    answer = client.responses.create(model="tiny", input="hello", instructions="be kind", metadata={"a": "b"})
    assert answer.output_text == "hello there"
    assert (answer.status, answer.model, answer.error) == ("completed", "tiny", None)
    assert (answer.instructions, answer.metadata, answer.store) == ("be kind", {"a": "b"}, False)  # type: ignore[attr-defined]
    assert answer.usage is not None
    assert answer.usage.input_tokens == len(server.submission.prompt.token_ids)
    assert answer.usage.input_tokens_details.cached_tokens == 2
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert "be kind" in server.prompt()


def test_what_the_client_asks_for_is_what_the_engine_is_asked_for(server: Agents, client: openai.OpenAI) -> None:
    client.responses.create(
        model="tiny",
        input="hello",
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.25,
        store=True,
        reasoning={"effort": "low"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
        extra_body={"seed": 3, "top_k": 4},
    )
    sampling, parsing = server.submission.sampling, server.submission.parsing
    assert parsing is not None
    expected = {"max_tokens": 7, "temperature": 0.5, "top_p": 0.25, "seed": 3, "top_k": 4}
    assert {name: sampling[name] for name in expected} == expected
    assert parsing.reasoning_effort == "low"
    form = {"name": "n", "schema": {"type": "object"}, "strict": True}
    assert parsing.response_format == {"type": "json_schema", "json_schema": form}


def test_images_are_seen_in_messages_and_in_the_results_of_tools(server: Agents, client: openai.OpenAI) -> None:
    items: Any = [
        {"role": "user", "content": [IMAGE, {"type": "input_text", "text": "look"}]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "see"}, IMAGE]},
    ]
    assert client.responses.create(model="tiny", input=items).status == "completed"
    assert len(server.submission.prompt.items) == 2


def test_calls_of_tools_come_whole_and_go_back(server: Agents, client: openai.OpenAI) -> None:
    server.answer = Answer("hm", "I look.", CALLS, "tool_calls")
    tools: Any = [LOOK, GO]
    answer = client.responses.create(model="tiny", input="hello", tools=tools, parallel_tool_calls=True)
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    found = [(one.call_id, one.name, one.arguments) for one in answer.output if one.type == "function_call"]
    assert found == [(call["id"], *call["function"].values()) for call in CALLS]
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens == 1
    results: Any = [{"type": "function_call_output", "call_id": call["id"], "output": "done"} for call in CALLS]
    server.answer = Answer(content="good")
    items: Any = [{"role": "user", "content": "hello"}, *answer.output, *results]
    again = client.responses.create(model="tiny", input=items, tools=tools)
    assert again.output_text == "good"
    assert "I look." in server.prompt()


def test_a_custom_tool_takes_text(server: Agents, client: openai.OpenAI) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "patch", "arguments": '{"input": "a\\nb"}'}}
    server.answer = Answer(calls=(call,), finish="tool_calls")
    tools: Any = [{"type": "custom", "name": "patch", "description": "any text"}]
    (item,) = client.responses.create(model="tiny", input="hello", tools=tools).output
    assert item.type == "custom_tool_call"
    assert (item.name, item.input, item.call_id) == ("patch", "a\nb", "c")
    done = list(client.responses.create(model="tiny", input="x", tools=tools, stream=True))
    assert [one.input for one in done if one.type == "response.custom_tool_call_input.done"] == ["a\nb"]


ANSWERS = {
    "text": Answer(content="hello there"),
    "nothing": Answer(),
    "reasoning": Answer("let me think", "42"),
    "calls": Answer("hm", "I look.", CALLS, "tool_calls"),
    "cut": Answer("hm", "hello th", (), "length"),
    "a cut call": Answer(calls=({**CALLS[0], "function": {"name": "look", "arguments": '{"a'}},), finish="length"),
}


def bare(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without what differs between two requests."""
    text = TypeAdapter(dict[str, Any]).dump_json(answer).decode()
    name = answer["id"].removeprefix("resp_")
    found = TypeAdapter(dict[str, Any]).validate_json(text.replace(name, "X"))
    return {name: value for name, value in found.items() if name != "created_at"}


@pytest.mark.parametrize("kind", ANSWERS)
def test_the_last_event_of_a_stream_has_the_whole_answer(server: Agents, kind: str) -> None:
    server.answer = ANSWERS[kind]
    body = {"model": "tiny", "input": "hello", "tools": [LOOK, GO]}
    whole = raw(server, body)
    found = events(server, body)
    assert bare(found[-1]["response"]) == bare(whole)
    assert found[-1]["type"] == f"response.{whole['status']}"
    items = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert items == found[-1]["response"]["output"]


@pytest.mark.parametrize("kind", [kind for kind, answer in ANSWERS.items() if answer.finish != "length"])
async def test_the_client_s_own_stream_makes_the_same_answer(server: Agents, kind: str) -> None:
    """The client makes none of an answer that was cut."""
    server.answer = ANSWERS[kind]
    tools: Any = [LOOK, GO]
    async with (
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60) as client,
        client.responses.stream(model="tiny", input="hello", tools=tools) as stream,
    ):
        texts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert "".join(texts) == server.answer.content == final.output_text
    calls = [item.arguments for item in final.output if item.type == "function_call"]
    assert calls == [call["function"]["arguments"] for call in server.answer.calls]


def test_an_error_in_a_stream_ends_it_with_events_of_its_own(server: Agents) -> None:
    server.answer = Answer(content="hello", fails=True)
    *_, error, failed = events(server, {"input": "hello"})
    assert (error["type"], error["code"]) == ("error", "engine_failed")
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"]["code"] == "server_error"
    assert failed["response"]["output"][0]["content"][0]["text"] == "hello"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the items of the previous answer"),
        ({"conversation": "conv_1"}, "conversation", "send the whole conversation"),
        ({"background": True}, "background", "send it with stream"),
        ({"truncation": "auto"}, "truncation", "send fewer"),
        ({"prompt": {"id": "p"}}, "prompt", "as instructions"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "offer a function"),
        ({"tool_choice": "required"}, "tool_choice", "send tools"),
        ({"input": []}, "input", "at least one"),
        ({"input": [{"type": "item_reference", "id": "m"}]}, "input[0]", "send the item itself"),
        ({"input": [{"type": "computer_call"}]}, "input[0]", "not supported"),
        ({"input": [{"role": "bot", "content": ""}]}, "input[0].role", "must be one of"),
        ({"input": [{"role": "user", "content": [{"type": "cube"}]}]}, "input[0].content[0]", "not supported"),
        (
            {"input": [{"role": "user", "content": [{**IMAGE, "file_id": "file-1"}]}]},
            "input[0].content[0]",
            "send one of them",
        ),
        (
            {"instructions": "x", "input": [{"role": "user", "content": [{**IMAGE, "image_url": "data:,"}]}]},
            "input[0].content[0]",
            "is not of the form",
        ),
        (
            {"input": [{"type": "reasoning", "encrypted_content": "x"}]},
            "input[0].encrypted_content",
            "leave it out",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens", "must be at least 1"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.name", "is missing"),
    ],
)
def test_what_is_refused_is_named_as_the_client_wrote_it(
    client: openai.OpenAI, fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**({"input": "hello"} | fields))
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)
    assert words in str(caught.value)


def test_null_and_what_means_nothing_is_as_good_as_left_out(server: Agents) -> None:
    neutral = {"background": False, "truncation": "disabled", "previous_response_id": None, "conversation": None}
    assert raw(server, {"input": "hello", **neutral, "service_tier": "auto", "include": []})["status"] == "completed"


def test_log_probabilities_are_asked_for_by_name(server: Agents) -> None:
    raw(server, {"input": "hello", "include": ["message.output_text.logprobs"], "top_logprobs": 2})
    assert server.submission.sampling["logprobs"] == 2
    raw(server, {"input": "hello", "top_logprobs": 2})
    assert "logprobs" not in server.submission.sampling


def test_tokens_are_counted_without_an_answer(server: Agents, client: openai.OpenAI) -> None:
    server.last = None
    items: Any = [{"role": "user", "content": [IMAGE, {"type": "input_text", "text": "look"}]}]
    counted = client.responses.input_tokens.count(model="tiny", input=items)
    assert server.last is None
    answer = client.responses.create(model="tiny", input=items)
    assert answer.usage is not None
    assert counted.input_tokens == answer.usage.input_tokens


def test_a_message_that_is_not_complete_is_continued(server: Agents) -> None:
    message = {"type": "message", "role": "assistant", "status": "incomplete", "id": "m"}
    text = {"type": "output_text", "text": "Once upon", "annotations": []}
    raw(server, {"input": [{"role": "user", "content": "a tale"}, {**message, "content": [text]}]})
    assert server.prompt().endswith("Once upon")
    raw(
        server,
        {"input": [{"role": "user", "content": "a tale"}, {**message, "status": "completed", "content": [text]}]},
    )
    assert not server.prompt().endswith("Once upon")
