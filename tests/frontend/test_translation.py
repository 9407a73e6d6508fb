"""Requests of other APIs become chats, and chats' answers become theirs: nothing is lost, nothing is invented.

The model and the random conversations are in `conversations`. Each property is tried on wrong translations as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from semel.errors import EngineFailed
from semel.frontend.api.anthropic import input as messages_input
from semel.frontend.api.anthropic.request import TRANSLATED_MESSAGES
from semel.frontend.api.anthropic.response import MessagesStream, whole_answer
from semel.frontend.api.openai.chat_response import ChatCompletion, ChatCompletionChunk
from semel.frontend.api.openai.translation import Messages
from semel.frontend.api.responses import input as responses_input
from semel.frontend.api.responses.events import ResponsesStream
from semel.frontend.api.responses.request import TRANSLATED_RESPONSES
from semel.frontend.api.responses.response import ResponsesHead
from tests.effort import examples
from tests.frontend import conversations as model
from tests.frontend.agents import Answer

RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 2}}
many = settings(max_examples=examples(200), deadline=None, database=None, suppress_health_check=list(HealthCheck))
few = settings(
    max_examples=300, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)


def check_responses_request(talk: model.Talk) -> None:
    body = {"input": model.responses_input(talk), "instructions": talk[0] or None}
    translated = TRANSLATED_RESPONSES.validate_json(json.dumps(body))
    assert model.facts_of_chat(translated.messages) == model.facts(talk, results_show=True)
    assert len(translated.terms.places) == len(translated.messages)


def check_messages_request(talk: model.Talk) -> None:
    body = {"messages": model.messages_input(talk), "max_tokens": 8, "system": talk[0] or None}
    translated = TRANSLATED_MESSAGES.validate_json(json.dumps(body))
    assert model.facts_of_chat(translated.messages) == model.facts(talk, results_show=False)
    assert len(translated.terms.places) == len(translated.messages)


def whole_chat(answer: Answer) -> ChatCompletion:
    choice = {"message": answer.message(), "logprobs": None, "finish_reason": answer.finish, "stop_reason": answer.stop}
    usage = {**USAGE, "completion_tokens_details": None}
    return cast("ChatCompletion", {"model": "tiny", "choices": [choice], "usage": usage})


def chunks(answer: Answer, cuts: list[int]) -> Iterator[ChatCompletionChunk]:
    """The answer in pieces: some empty, some with several deltas."""
    yield _chunk({"role": "assistant", "content": ""})
    deltas = [*answer.deltas()]
    for cut in cuts:
        if cut == 0:
            yield _chunk({})
        elif cut == 2 and len(deltas) > 1 and not deltas[0].keys() & deltas[1].keys():
            yield _chunk({**deltas.pop(0), **deltas.pop(0)})
        elif deltas:
            yield _chunk(deltas.pop(0))
    for delta in deltas:
        yield _chunk(delta)
    yield _chunk({}, answer.finish, answer.stop)
    yield cast("ChatCompletionChunk", {"choices": [], "usage": USAGE})


def _chunk(delta: dict[str, Any], finish: str | None = None, stop: int | str | None = None) -> ChatCompletionChunk:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, "stop_reason": stop}
    return cast("ChatCompletionChunk", {"choices": [choice]})


def encoded(value: object) -> Any:
    return json.loads(msgspec.json.encode(value))


def check_responses_answer(answer: Answer, cuts: list[int]) -> None:
    head = ResponsesHead("x", "tiny", 0)
    whole = encoded(head.whole(whole_chat(answer)))
    Response.model_validate(whole, strict=True)
    back = responses_input.input_messages(None, [{"role": "user", "content": "?"}, *whole["output"]]).messages[1:]
    assert model.facts_of_chat(back) == model.facts_of_chat([{"role": "assistant", **answer.message()}])
    assert (whole["status"] == "incomplete") is (answer.finish == "length")
    stream = ResponsesStream(head)
    found = [encoded(event) for chunk in chunks(answer, cuts) for event in stream.events(chunk)]
    found += [encoded(event) for event in stream.closing()]
    for number, event in enumerate(found):
        assert event["sequence_number"] == number
        RESPONSE_EVENT.validate_python(event, strict=True)
    assert found[-1]["response"] == whole
    assert [_assembled_item(found, index) for index in range(len(whole["output"]))] == [
        _plain_item(item) for item in whole["output"]
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"content": "because"},
        {"content": [{"type": "reasoning_text", "text": "be"}, {"type": "reasoning_text", "text": "cause"}]},
        {"summary": "because"},
        {"summary": [{"type": "summary_text", "text": "because"}]},
    ],
)
def test_reasoning_reaches_the_chat_in_whatever_form_it_is_sent(fields: dict[str, Any]) -> None:
    made = responses_input.input_messages(None, [{"role": "user", "content": "?"}, {"type": "reasoning", **fields}])
    assert made.messages[1]["reasoning"] == "because"


def _assembled_item(found: list[dict[str, Any]], index: int) -> tuple[str, str, str]:
    """An item as the deltas make it."""
    events = [event for event in found if event.get("output_index") == index]
    added, done = events[0], events[-1]
    assert (added["type"], done["type"]) == ("response.output_item.added", "response.output_item.done")
    text = "".join(event["delta"] for event in events if event["type"].endswith(".delta"))
    assert _plain_item(done["item"])[2] == text
    return added["item"]["type"], added["item"].get("call_id", ""), text


def _plain_item(item: dict[str, Any]) -> tuple[str, str, str]:
    text = item["arguments"] if item["type"] == "function_call" else "".join(part["text"] for part in item["content"])
    return item["type"], item.get("call_id", ""), text


def check_messages_answer(answer: Answer, cuts: list[int]) -> None:
    whole = encoded(whole_answer(whole_chat(answer), "x"))
    Message.model_validate(whole, strict=True)
    asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": whole["content"]}]
    back = messages_input.messages_input(None, asked).messages[1:]
    assert model.facts_of_chat(back) == model.facts_of_chat([{"role": "assistant", **answer.message()}])
    stream = MessagesStream("x", "tiny")
    found = [encoded(event) for chunk in chunks(answer, cuts) for event in stream.events(chunk)]
    found += [encoded(event) for event in stream.closing()]
    for event in found:
        MESSAGE_EVENT.validate_python(event, strict=True)
    assert _assembled_message(found) == whole


def _assembled_message(found: list[dict[str, Any]]) -> dict[str, Any]:
    message = found[0]["message"]
    open_block: int | None = None
    inputs: dict[int, str] = {}
    for event in found[1:]:
        match event["type"]:
            case "content_block_start":
                assert open_block is None
                open_block = event["index"]
                assert open_block == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta":
                assert event["index"] == open_block
                delta = {name: value for name, value in event["delta"].items() if name != "type"}
                ((name, text),) = delta.items()
                if name == "partial_json":
                    inputs[event["index"]] = inputs.get(event["index"], "") + text
                else:
                    message["content"][event["index"]][name] += text
            case "content_block_stop":
                assert event["index"] == open_block
                open_block = None
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)
    assert found[-1] == {"type": "message_stop"}
    return dict(message)


cuts = st.lists(st.integers(0, 2), max_size=12)


@given(model.conversations)
@many
def test_a_responses_request_is_the_chat_that_it_says(talk: model.Talk) -> None:
    check_responses_request(talk)


@given(model.conversations)
@many
def test_a_messages_request_is_the_chat_that_it_says(talk: model.Talk) -> None:
    check_messages_request(talk)


@given(model.answers, cuts)
@many
def test_a_responses_answer_is_the_chat_s_and_its_events_make_it(answer: Answer, cuts: list[int]) -> None:
    check_responses_answer(answer, cuts)


@given(model.answers, cuts)
@many
def test_a_messages_answer_is_the_chat_s_and_its_events_make_it(answer: Answer, cuts: list[int]) -> None:
    check_messages_answer(answer, cuts)


def _first_text_only(content: Any) -> Any:
    """As vLLM has it: of an assistant's texts the first."""
    return content if isinstance(content, str) else content[0]["text"]


def _call_apart(made: Messages, call: dict[str, Any], place: str) -> None:
    made.messages.append({"role": "assistant", "tool_calls": [{**call, "id": "same"}]})
    made.places.append(place)


def _lost_image(block: dict[str, Any], where: str) -> dict[str, Any]:
    return {"type": "text", "text": ""}


def _overwriting(made: Messages, name: str, value: object, place: str) -> None:
    if made.messages and made.messages[-1]["role"] == "assistant":
        made.messages[-1] = {"role": "assistant", name: value}
    else:
        made.add({"role": "assistant", name: value}, place)


def _never_closed(*_: object) -> Iterator[Any]:
    yield from ()


def _doubled(stream: Any, call: Any) -> Iterator[Any]:
    yield from _ADD_CALL(stream, call)
    yield from _ADD_CALL(stream, call)


_ADD_CALL = ResponsesStream._add_call
MUTANTS: dict[str, tuple[Callable[..., None], Any, str, Any]] = {
    "only the first text": (check_responses_request, responses_input, "_joined", _first_text_only),
    "calls without their ids": (check_responses_request, Messages, "call", _call_apart),
    "one field of a message over another": (check_responses_request, Messages, "put", _overwriting),
    "images are lost": (check_messages_request, messages_input, "_image", _lost_image),
    "results are lost": (check_messages_request, messages_input, "_add_result", lambda *_: None),
    "blocks that do not end": (check_messages_answer, MessagesStream, "_close", _never_closed),
    "items that do not end": (check_responses_answer, ResponsesStream, "_close", _never_closed),
    "arguments twice": (check_responses_answer, ResponsesStream, "_add_call", _doubled),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_translation_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check, place, name, wrong = MUTANTS[mutant]
    monkeypatch.setattr(place, name, wrong)
    drawn = (model.conversations,) if check in (check_responses_request, check_messages_request) else ()

    def run(*values: Any) -> None:
        check(*values)

    with pytest.raises((AssertionError, LookupError)):
        given(*(drawn or (model.answers, cuts)))(few(_with_arity(run, 1 if drawn else 2)))()


def _with_arity(run: Callable[..., None], count: int) -> Callable[..., None]:
    """hypothesis counts the arguments of what it calls."""
    if count == 1:
        return lambda one: run(one)
    return lambda one, other: run(one, other)


def test_a_piece_that_comes_late_is_not_lost() -> None:
    """More of a call after text or another call began: it is sent, and in the whole answer."""
    deltas: list[dict[str, Any]] = [
        {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": "{"}}]},
        {"content": "so"},
        {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]},
    ]
    stream = ResponsesStream(ResponsesHead("x", "tiny", 0))
    found = [encoded(event) for delta in deltas for event in stream.events(_chunk(delta))]
    found += [encoded(event) for event in stream.closing()]
    assert found[-1]["response"]["output"][0]["arguments"] == "{}"
    messages = MessagesStream("x", "tiny")
    blocks = [encoded(event) for delta in deltas for event in messages.events(_chunk(delta))]
    pieces = [event["delta"] for event in blocks if event.get("index") == 0 and "delta" in event]
    assert [piece["partial_json"] for piece in pieces] == ["{", "}"]


def test_a_stream_that_fails_before_its_first_chunk_begins_as_openai_s_client_needs_it() -> None:
    found = [encoded(event) for event in ResponsesStream(ResponsesHead("x", "tiny", 0)).failure(EngineFailed("no"))]
    assert [event["type"] for event in found] == [
        "response.created",
        "response.in_progress",
        "error",
        "response.failed",
    ]
    state: Any = ResponseStreamState(input_tools=[], text_format=object)
    for event in found:
        state.handle_event(TypeAdapter[Any](ResponseStreamEvent).validate_python(event))
    with pytest.raises(RuntimeError, match=r"response\.created"):  # the control: without a beginning
        ResponseStreamState(input_tools=[], text_format=object).handle_event(
            TypeAdapter[Any](ResponseStreamEvent).validate_python(found[2])
        )


@pytest.mark.parametrize("wrong", [[], {}, ["text"], 1, True, None])
def test_a_type_or_a_status_of_another_type_is_no_failure_of_ours(wrong: object) -> None:
    part = {"role": "user", "content": [{"type": wrong, "text": "a"}]}
    TRANSLATED_RESPONSES.validate_python({"input": [part]})  # a chat refuses it when its messages are parsed
    last = {"role": "assistant", "content": "a", "status": wrong}
    TRANSLATED_RESPONSES.validate_python({"input": [last]})


def test_mutant_a_set_of_types_cannot_be_asked_for_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses_input, "_OPEN", frozenset(responses_input._OPEN))
    with pytest.raises(TypeError):
        TRANSLATED_RESPONSES.validate_python({"input": [{"role": "assistant", "content": "a", "status": []}]})
