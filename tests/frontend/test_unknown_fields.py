"""Fields that an API does not have are ignored with a warning, refused, or ignored. Every field of vLLM has a place."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from time import thread_time
from typing import Any

import pytest

from semel.engine.vllm.compat.source import SourceTree
from semel.frontend.api.anthropic.request import MESSAGES_REFUSED, CountTokensRequest, MessagesRequest
from semel.frontend.api.openai.audio_request import SPEECH_REFUSED, TranscriptionRequest, TranslationRequest
from semel.frontend.api.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from semel.frontend.api.responses.request import RESPONSES_REFUSED, ResponsesRequest
from semel.frontend.api.shared import unknown_fields
from semel.frontend.api.shared.fields import REFUSED
from semel.frontend.api.shared.unknown_fields import UnknownFields, UnknownFieldsMode, nearest
from semel.frontend.api.tokens.generate_request import GenerateRequest
from semel.frontend.http import body as body_module
from semel.frontend.http.ignored_fields import IGNORED_FIELDS_HEADER, IgnoredFields
from tests.frontend.rig import Rig

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
BODIES: Mapping[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 1},
    "/v1/completions": {"prompt": "hello", "max_tokens": 1},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/v1/chat/completions/render": {"messages": HELLO},
    "/tokenize": {"messages": HELLO},
    "/detokenize": {"tokens": [1]},
    "/inference/v1/generate": {"token_ids": [1], "sampling_params": {"max_tokens": 1}},
}
GATEWAYS = {"chat_id": "1", "filters": {"web": True}, "background_tasks": {"title": True}, "enable_thinking": False}
OPERATORS = ("ec_transfer_params", "kv_transfer_params", "vllm_xargs")
MODES: tuple[UnknownFieldsMode, ...] = ("warn", "refuse", "ignore")

FOREIGN = (
    *("models", "route", "provider", "transforms", "plugins", "top_a", "usage", "trace", "options", "keep_alive"),
    *("format", "images", "template", "think", "typical_p", "tfs_z", "mirostat", "repeat_penalty", "num_ctx"),
    *("n_predict", "cache_prompt", "grammar", "json_schema", "samplers", "min_keep", "id_slot", "n_probs"),
    *("separate_reasoning", "stream_reasoning", "regex", "ebnf", "lora_path", "rid", "stop_regex", "no_stop_trim"),
    *("max_new_tokens", "min_new_tokens", "do_sample", "random_seed", "safe_prompt", "prompt_mode", "prefix"),
    *("thinking_budget", "enable_search", "search_parameters", "reasoning_format", "prompt_truncate_len"),
    *("perf_metrics_in_response", "safety_model", "deferred", "return_images", "api_key", "timeout", "user_id"),
    *("num_retries", "fallbacks", "tags", "guardrails", "session", "seeds", "extra_body", "extra_headers"),
    *("conversation_id", "parent_id", "message_id", "title", "tool_ids", "files", "variables", "filter_ids"),
)
"""What other servers, gateways and user interfaces have, and clients send."""


@pytest.mark.parametrize("path", BODIES)
async def test_what_a_gateway_adds_is_ignored_and_the_answer_says_so(app: Rig, path: str) -> None:
    plain = await app.post(path, BODIES[path])
    assert IGNORED_FIELDS_HEADER not in plain.headers
    reply = await app.post(path, {**BODIES[path], **GATEWAYS})
    assert reply.status_code == plain.status_code == 200, reply.text
    assert reply.headers[IGNORED_FIELDS_HEADER] == ", ".join(GATEWAYS)
    assert app.metrics("semel_ignored_fields_total") == {f'semel_ignored_fields_total{{route="{path}"}}': "4.0"}


async def test_a_stream_and_an_error_name_what_was_ignored_too(app: Rig) -> None:
    reply = await app.post(CHAT, {**BODIES[CHAT], "stream": True, "chat_id": "1"})
    assert (reply.status_code, reply.headers[IGNORED_FIELDS_HEADER]) == (200, "chat_id")
    refused = await app.post(CHAT, {**BODIES[CHAT], "model": "gpt-5", "chat_id": "1"})
    assert (refused.status_code, refused.headers[IGNORED_FIELDS_HEADER]) == (404, "chat_id")


@pytest.mark.parametrize("path", BODIES)
async def test_they_can_be_refused_or_ignored_without_a_word(app: Rig, path: str) -> None:
    app.service.unknown_fields_mode = "refuse"
    assert (await app.post(path, BODIES[path])).status_code == 200
    refused = await app.post(path, {**BODIES[path], **GATEWAYS})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("chat_id: unknown field; leave it out")
    app.service.unknown_fields_mode = "ignore"
    reply = await app.post(path, {**BODIES[path], **GATEWAYS, "mesages": HELLO})
    assert (reply.status_code, IGNORED_FIELDS_HEADER in reply.headers) == (200, False)
    assert app.metrics("semel_ignored_fields_total") == {f'semel_ignored_fields_total{{route="{path}"}}': "5.0"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPERATORS)
async def test_what_is_the_operators_to_say_is_refused_in_every_mode(
    app: Rig, mode: UnknownFieldsMode, name: str
) -> None:
    app.service.unknown_fields_mode = mode
    for path in BODIES:
        status, message = await app.refused(path, {**BODIES[path], name: {"do_remote_prefill": True}})
        assert (status, message.split(": ")[:2]) == (400, [name, "not supported"])


@pytest.mark.parametrize("mode", ["warn", "refuse"])
@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("tempurature", "temperature"),
        ("temprature", "temperature"),
        ("max_token", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("max-tokens", "max_tokens"),
        ("topP", "top_p"),
        ("Temperature", "temperature"),
        ("tool_chioce", "tool_choice"),
        ("reponse_format", "response_format"),
        ("sttream", "stream"),
    ],
)
async def test_a_near_miss_is_refused_with_what_was_meant(
    app: Rig, mode: UnknownFieldsMode, written: str, meant: str
) -> None:
    app.service.unknown_fields_mode = mode
    reply = await app.post(CHAT, {"messages": HELLO, written: 1})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, written)
    assert error["message"] == f"{written}: unknown field; did you mean {meant}?"


async def test_what_looks_like_a_near_miss_is_none_if_the_field_is_there_or_another_api_has_it(app: Rig) -> None:
    both = await app.post(CHAT, {**BODIES[CHAT], "maxTokens": 1})
    assert (both.status_code, both.headers[IGNORED_FIELDS_HEADER]) == (200, "maxTokens")
    other = await app.post("/v1/messages", {**BODIES["/v1/messages"], "min_tokens": 1})
    assert (other.status_code, other.headers[IGNORED_FIELDS_HEADER]) == (200, "min_tokens")


@pytest.mark.parametrize("kind", [ChatCompletionRequest, CompletionRequest, ResponsesRequest, MessagesRequest])
def test_no_field_of_another_server_is_a_near_miss(kind: type[ChatCompletionRequest]) -> None:
    assert not {name: meant for name in FOREIGN if (meant := nearest(name, kind.model_fields)) is not None}


def test_mutant_a_distance_of_one_for_short_names_refuses_what_other_servers_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unknown_fields, "_MIN_NEAR_CHARS", 1)
    known = ChatCompletionRequest.model_fields
    assert {name for name in FOREIGN if nearest(name, known)} >= {"models", "top_a", "seeds"}


def test_a_field_of_the_api_is_not_a_near_miss_of_another_so_that_one_slip_has_one_meaning() -> None:
    known = ChatCompletionRequest.model_fields
    assert not [(one, nearest(one, known.keys() - {one})) for one in known if nearest(one, known.keys() - {one})]


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("x\r\nset-cookie: a=b", "x??set-cookie??a?b"),
        ("é, other", "???other"),
        ("\0\ud800", "??"),
        ("", "?"),
        ("k" * 65, "k" * 61 + "..."),
    ],
)
def test_a_name_cannot_end_the_header_or_add_one(name: str, printed: str) -> None:
    assert UnknownFields(count=1, names=[name]).header() == printed


async def test_a_header_names_a_few_and_counts_the_rest(app: Rig) -> None:
    reply = await app.post(CHAT, {**BODIES[CHAT], **{f"{'k' * 500}\r\n{number}": 1 for number in range(1_000)}})
    header = reply.headers[IGNORED_FIELDS_HEADER]
    assert reply.status_code == 200
    assert header.endswith(", 984 more")
    assert len(header) <= 16 * 66 + 10


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    caplog.set_level(logging.INFO, "semel.frontend.http.ignored_fields")
    yield lambda: [record.getMessage() for record in caplog.records]


async def test_the_log_has_a_line_a_minute(app: Rig, told: Callable[[], list[str]]) -> None:
    now = [0.0]
    app.service.ignored_fields = IgnoredFields(lambda: now[0])
    for _ in range(3):
        await app.post(CHAT, {**BODIES[CHAT], "chat_id\n": 1})
    assert len(told()) == 1
    assert f"a request to {CHAT} has fields" in told()[0]
    assert "chat_id?" in told()[0]
    now[0] = 61
    await app.post(CHAT, {**BODIES[CHAT], "chat_id": 1})
    assert told()[1].endswith("like this: 3)")


# Large bodies


def keys(count: int, digits: int) -> dict[str, int]:
    return {f"{number:0{digits}}": 1 for number in range(count)}


@pytest.fixture
def longest_step_s(app: Rig, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, bytes], Awaitable[float]]:
    """The longest step of the event loop while a body is refused, in CPU time, in the best of three rounds."""
    steps: list[float] = []
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        began_s = thread_time()
        run(handle)
        steps.append(thread_time() - began_s)

    async def longest(path: str, body: bytes) -> float:
        rounds = []
        for _ in range(3):
            steps.clear()
            reply = await app.client.post(path, content=body)
            rounds.append(max(steps))
            assert (reply.status_code, "members; the limit is 4,096" in reply.text) == (400, True)
        return min(rounds)

    monkeypatch.setattr(asyncio.Handle, "_run", timed)
    return longest


@pytest.mark.parametrize("mode", MODES)
async def test_a_body_has_at_most_4096_members(app: Rig, mode: UnknownFieldsMode) -> None:
    app.service.unknown_fields_mode = mode
    most = keys(4_096 - len(BODIES[CHAT]), 4)
    assert (await app.post(CHAT, {**BODIES[CHAT], **most})).status_code == (400 if mode == "refuse" else 200)
    for path, body in BODIES.items():
        status, message = await app.refused(path, {**body, **keys(4_097 - len(body), 4)})
        assert (status, message) == (400, "an object of the request has 4,097 members; the limit is 4,096")


@pytest.mark.parametrize(
    ("path", "count", "digits"),
    [(CHAT, 20_000, 5), ("/v1/responses", 60_000, 50), ("/inference/v1/generate", 20_000, 5)],
)
async def test_refusing_many_unknown_fields_takes_10_ms_of_the_event_loop_at_most(
    longest_step_s: Callable[[str, bytes], Awaitable[float]], path: str, count: int, digits: int
) -> None:
    """A body of 20,000 is small enough for the event loop, but for its many values."""
    assert await longest_step_s(path, json.dumps({**BODIES[path], **keys(count, digits)}).encode()) <= 0.010


async def test_mutant_many_fields_that_are_parsed_on_the_event_loop_take_longer(
    longest_step_s: Callable[[str, bytes], Awaitable[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = json.dumps({**BODIES[CHAT], **keys(60_000, 50)}).encode()
    shipped_s = await longest_step_s(CHAT, body)
    monkeypatch.setattr(body_module, "_is_small", lambda _: True)
    assert await longest_step_s(CHAT, body) > 3 * shipped_s  # 19 ms and 2.6


@pytest.mark.parametrize("media", [False, True])
async def test_large_bodies_with_unknown_fields_are_answered_as_small_ones(app: Rig, media: bool) -> None:
    """Also where a long string of base64 is in an unknown field."""
    long = "A" * 400_000 if media else "word " * 80_000
    sent = {"x": {"deep": [long]}, **BODIES[CHAT], "mess\u00e4ges": long, "temperature": 0}
    reply = await app.post(CHAT, sent)
    assert (reply.status_code, reply.headers[IGNORED_FIELDS_HEADER]) == (200, "x, mess?ges")
    refused = await app.post(CHAT, {**sent, "temprature": 0, "temperature": None})
    assert refused.status_code == 200  # the field is there, though it is null
    del sent["temperature"]
    status, message = await app.refused(CHAT, {**sent, "temprature": 0})
    assert (status, message) == (400, "temprature: unknown field; did you mean temperature?")
    app.service.unknown_fields_mode = "refuse"
    assert (await app.refused(CHAT, sent))[1].startswith("x: unknown field")


# vLLM's own requests

_OPENAI = "openai.chat_completion.protocol"
VLLM = [
    (_OPENAI, "ChatCompletionRequest", ChatCompletionRequest, REFUSED),
    ("openai.completion.protocol", "CompletionRequest", CompletionRequest, REFUSED),
    ("openai.responses.protocol", "ResponsesRequest", ResponsesRequest, RESPONSES_REFUSED),
    ("anthropic.protocol", "AnthropicMessagesRequest", MessagesRequest, MESSAGES_REFUSED),
    ("anthropic.protocol", "AnthropicCountTokensRequest", CountTokensRequest, MESSAGES_REFUSED),
    ("serve.tokenize.protocol", "TokenizeCompletionRequest", TokenizeTextRequest, REFUSED),
    ("serve.tokenize.protocol", "TokenizeChatRequest", TokenizeChatRequest, REFUSED),
    ("serve.tokenize.protocol", "DetokenizeRequest", DetokenizeRequest, REFUSED),
    (
        "scale_out.token_in_token_out.protocol",
        "GenerateRequest",
        GenerateRequest,
        {**REFUSED, **GenerateRequest.unsupported},
    ),
    ("speech_to_text.transcription.protocol", "TranscriptionRequest", TranscriptionRequest, SPEECH_REFUSED),
    ("speech_to_text.translation.protocol", "TranslationRequest", TranslationRequest, SPEECH_REFUSED),
]


def vllm_fields(module: str, name: str) -> set[str]:
    source = SourceTree.installed("vllm")
    if source is None:
        pytest.skip("vLLM is not installed")
    found = source.find(f"vllm.entrypoints.{module}", name)
    assert found is not None
    assert found.parameters is not None
    return {one for one in found.parameters if not one.startswith("_")} - {"field_names"}  # that is the class's


@pytest.mark.parametrize(("module", "name", "kind", "refused"), VLLM, ids=[row[1] for row in VLLM])
def test_every_field_of_vllm_s_requests_is_served_without_effect_or_refused_by_name(
    module: str, name: str, kind: type[ChatCompletionRequest], refused: Mapping[str, Any]
) -> None:
    theirs = vllm_fields(module, name)
    assert len(theirs) >= 2
    assert not theirs - set(kind.model_fields) - set(refused)


def test_the_comparison_sees_a_field_that_has_no_place() -> None:
    """A control."""
    ours = ChatCompletionRequest.model_fields.keys() - {"min_p"}
    assert vllm_fields(_OPENAI, "ChatCompletionRequest") - ours - set(REFUSED) == {"min_p"}
