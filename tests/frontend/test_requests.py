"""What a client may send: carried out, accepted without effect, or refused by name (S15)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from semel.core import Digest
from semel.errors import InvalidRequest
from semel.frontend.api.anthropic.request import MESSAGES_REFUSED, MessagesRequest
from semel.frontend.api.openai.requests import ChatCompletionRequest, CompletionRequest
from semel.frontend.api.responses.request import RESPONSES_REFUSED, ResponsesRequest
from semel.frontend.api.shared.fields import REFUSED, Ignored
from tests.frontend.rig import Rig
from tests.render.drawn import image_part

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "cache_control": {"type": "ephemeral"}}}
SHOWN = {"type": "function", "function": {"name": "f", "description": None, "parameters": None}}


def chat(**fields: Any) -> ChatCompletionRequest:
    return TypeAdapter(ChatCompletionRequest).validate_python({"messages": HELLO, **fields})


def completion(**fields: Any) -> CompletionRequest:
    return TypeAdapter(CompletionRequest).validate_python({"prompt": "hello", **fields})


def test_null_means_the_same_as_leaving_it_out() -> None:
    nulls = dict.fromkeys({*ChatCompletionRequest.model_fields, *REFUSED} - {"messages"})
    assert chat(**nulls) == chat()


def test_a_field_that_nobody_knows_is_refused_even_if_it_is_null() -> None:
    with pytest.raises(InvalidRequest, match="tempurature: unknown field; did you mean temperature"):
        chat(tempurature=None)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_not_supported_is_refused_with_what_to_do_instead(name: str) -> None:
    neutral, instead = REFUSED[name]
    taken = name in ChatCompletionRequest.model_fields
    for value in neutral:
        assert taken or chat(**{name: value}) == chat()
    if not taken:
        with pytest.raises(InvalidRequest, match=rf"^{name}: not supported: "):
            chat(**{name: "something else"})
    assert instead


@pytest.mark.parametrize("name", sorted(Ignored.model_fields))
def test_what_cannot_change_the_answer_is_accepted(name: str) -> None:
    asked = chat(**{name: {"any": "thing"}})
    assert asked.sampling() == chat().sampling()
    assert asked.parsing() == chat().parsing()


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 129},
        {"n": 0},
        {"max_tokens": 2**31},
        {"top_logprobs": 21, "logprobs": True},
        {"prompt_logprobs": 21},
        {"stop": ["x"] * 17},
        {"stop": "x" * 1_025},
        {"logit_bias": {str(number): 1 for number in range(1_025)}},
        {"bad_words": ["x"] * 1_025},
        {"stop_token_ids": [1] * 129},
        {"logprob_token_ids": [1] * 129, "logprobs": True},
        {"tools": [TOOL] * 1_025},
        {"stream_interval": 65},
        {"stream_interval": 0},
        {"repetition_detection": {"max_pattern_size": 257}},
        {"repetition_detection": {"min_pattern_size": 257}},
        {"repetition_detection": {"min_count": 1_025}},
        {"seed": 2**63},
        {"priority": 2**63},
        {"structured_outputs": {"regex": "x" * 262_145}},
        {"structured_outputs": {"choice": ["x"] * 1_025}},
        {"structured_outputs": {"choice": []}},
        {"temperature": float("nan")},
        {"request_id": "x" * 129},
        {"request_id": "a b"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_costs_memory_or_time_is_bounded_S15(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        chat(**fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"tools": []}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"function": {"name": "g"}}}, "'g'"),
        ({"logprobs": True, "logprob_token_ids": [1] * 128, "n": 33}, "4,224 for the 33 answers; the limit is 4,096"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        chat(**fields)


def _described(chars: int) -> dict[str, Any]:
    """A schema whose JSON has so many characters."""
    return {"description": "é" * (chars - len('{"description":""}'))}


def _json_format(chars: int) -> dict[str, Any]:
    empty = '{"type":"json_schema","json_schema":{"name":"n","description":null,"schema":,"strict":null}}'
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": _described(chars - len(empty))}}


def _tag_format(chars: int) -> dict[str, Any]:
    return {"type": "structural_tag", "x": "x" * (chars - len('{"type":"structural_tag","x":""}'))}


@pytest.mark.parametrize(
    ("name", "given", "limit"),
    [
        ("response_format", _json_format, 262_144),
        ("response_format", _tag_format, 262_144),
        ("structured_outputs", lambda chars: {"json": _described(chars)}, 262_144),
        ("chat_template_kwargs", lambda chars: _described(chars - len("[[],]")), 1_048_576),
    ],
    ids=["schema", "tag", "json", "chat_template_kwargs"],
)
def test_what_travels_in_one_message_is_bounded_S15(
    name: str, given: Callable[[int], dict[str, Any]], limit: int
) -> None:
    """Control: one character less is taken."""
    assert chat(**{name: given(limit)})
    with pytest.raises(InvalidRequest, match=rf"{name}.* {limit + 1:,} characters; the limit is {limit:,}"):
        chat(**{name: given(limit + 1)})


@pytest.mark.parametrize(
    ("chars", "status", "begin"), [(4_000_000, 400, "response_format"), (17_000_000, 413, "the re")]
)
async def test_a_schema_that_no_message_could_carry_is_the_requests_fault_S15(
    app: Rig, chars: int, status: int, begin: str
) -> None:
    found, message = await app.refused(CHAT, {"messages": HELLO, "response_format": _json_format(chars)})
    assert (found, message[: len(begin)]) == (status, begin)
    assert len(message) < 200


def test_tools_are_bounded_in_all_and_with_what_is_for_the_template_S15() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "x" * 260_000}}
    assert chat(tools=[tool] * 4)
    for more in ({"tools": [tool] * 5}, {"tools": [tool] * 4, "chat_template_kwargs": {"x": "y" * 10_000}}):
        with pytest.raises(InvalidRequest, match=r"tools and chat_template_kwargs.*the limit is 1,048,576"):
            chat(**more)


def test_constraints_exclude_each_other() -> None:
    with pytest.raises(InvalidRequest, match="regex and choice"):
        chat(structured_outputs={"regex": "a", "choice": ["b"]}).sampling()
    with pytest.raises(InvalidRequest, match="regex and json_object"):
        completion(structured_outputs={"regex": "a"}, response_format={"type": "json_object"}).sampling()


def test_a_response_format_is_the_engines_constraint() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    assert completion(response_format=schema).sampling()["structured_outputs"] == {"json": {"type": "object"}}
    assert "structured_outputs" not in completion(response_format={"type": "text"}).sampling()
    tag = {"type": "structural_tag", "structures": [], "triggers": []}
    assert "structural_tag" in str(completion(response_format=tag).sampling()["structured_outputs"])
    assert chat(response_format=schema).parsing().response_format == schema


def test_tools_are_shown_alike_whatever_a_client_adds_or_leaves_out() -> None:
    asked = chat(tools=[TOOL])
    assert asked.chat().tools == asked.parsing().tools == [SHOWN]
    assert asked.parsing().tool_choice == "auto"
    assert chat().parsing().tool_choice == "none"
    named = chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "f"}})
    assert named.parsing().tool_choice == {"type": "function", "function": {"name": "f"}}


def test_the_longest_answer_is_what_was_asked_for_last() -> None:
    assert "max_tokens" not in chat().sampling()
    assert chat(max_tokens=5).sampling()["max_tokens"] == 5
    assert chat(max_tokens=5, max_completion_tokens=7).sampling()["max_tokens"] == 7
    assert completion().sampling()["max_tokens"] == 16
    assert completion(echo=True, max_tokens=0).sampling()["max_tokens"] == 1
    with pytest.raises(InvalidRequest, match="max_tokens"):
        completion(max_tokens=0)


async def test_what_was_asked_reaches_the_engine(app: Rig) -> None:
    body = {"messages": HELLO, "tools": [TOOL], "tool_choice": "required", "priority": -2, "bad_words": ["x"]}
    await app.ok(CHAT, body)
    submission = app.engine.last
    assert submission is not None
    assert submission.parsing is not None
    assert (submission.parsing.tool_choice, submission.parsing.tools) == ("required", [SHOWN])
    assert submission.priority == -2
    assert submission.sampling["bad_words"] == ["x"]
    await app.ok("/v1/completions", {"prompt": "hello"})
    assert app.engine.last is not None
    assert app.engine.last.parsing is None


async def test_an_answers_id_may_be_wished_for_and_need_not_be_unique(app: Rig) -> None:
    """Ids of clients stay at the surface: two requests with the same one do not meet inside."""
    for _ in range(2):
        answer = await app.ok(CHAT, {"messages": HELLO, "request_id": "mine"})
        assert answer["id"] == "chatcmpl-mine"
        assert app.engine.last is not None
        assert app.engine.last.request_id != "mine"
    response = await app.client.post(CHAT, json={"messages": HELLO}, headers={"x-request-id": "yours"})
    assert response.json()["id"] == "chatcmpl-yours"
    response = await app.client.post(CHAT, json={"messages": HELLO}, headers={"x-request-id": "x" * 129})
    assert "xxx" not in response.json()["id"]


async def test_a_uuid_is_a_hint_and_never_an_identity_S11(app: Rig) -> None:
    """The naive server would answer for the second picture from what it keeps of the first."""

    async def shown(number: int, **fields: Any) -> Digest:
        part = {**image_part(number), **fields}
        await app.ok(CHAT, {"messages": [{"role": "user", "content": [part]}]})
        assert app.engine.last is not None
        (item,) = app.engine.last.prompt.items
        return item.digest

    by_uuid: dict[str, Digest] = {}
    naive = [by_uuid.setdefault("same", await shown(number, uuid="same")) for number in (1, 2)]
    assert naive[0] == naive[1], "the control: two pictures are one"
    assert await shown(1, uuid="same") != await shown(2, uuid="same")
    assert await shown(1, uuid="same") == await shown(1, uuid="other") == await shown(1)
    for name, expected in (("same", 409), ("never", 404)):
        unseen = {"type": "image_url", "image_url": None, "uuid": name}
        status, message = await app.refused(CHAT, {"messages": [{"role": "user", "content": [unseen]}]})
        assert (status, "messages[0].content[0]" in message) == (expected, True)


async def test_a_model_that_is_not_served_is_404(app: Rig) -> None:
    status, message = await app.refused(CHAT, {"messages": HELLO, "model": "gpt-5"})
    assert (status, "gpt-5" in message) == (404, True)


def test_the_documentation_lists_every_field_that_is_refused_or_ignored() -> None:
    text = (Path(__file__).parents[2] / "docs" / "api" / "routes.md").read_text()
    missing = [name for name in (*REFUSED, *Ignored.model_fields) if f"`{name}`" not in text]
    fields = {*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields}
    fields |= {*ResponsesRequest.model_fields, *RESPONSES_REFUSED, *MessagesRequest.model_fields, *MESSAGES_REFUSED}
    assert not missing + [name for name in fields if f"`{name}`" not in text]
