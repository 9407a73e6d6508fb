"""The unmodified `openai` package against `semel serve` and against bare vLLM's server: the same answers (issue 8).

Every request goes to both. What may differ stands in `differences`, with reasons; everything else is compared, field by
field, also what the package does not know.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import openai
import pytest

from tests.engine.parity import data_url, draw_image, video
from tests.serve.both import HELLO, MODEL, Both, asked_of
from tests.serve.served import SEMEL, image_url, sum_of, until
from tests.serve.speaking import CALL_START, THINK_END

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PLAIN: Final = {"chat_template_kwargs": {"enable_thinking": False}}
"""Without it all is reasoning, until the model says that it is over, which it does by chance."""

CITY: Final = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
CITIES: Final = {**CITY, "additionalProperties": False}
WEATHER: Final = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": CITIES}}
NOW: Final = {"type": "function", "function": {"name": "now", "description": "The time."}}
NAMED: Final = {"type": "function", "function": {"name": "weather"}}
SCHEMA: Final = {"type": "json_schema", "json_schema": {"name": "place", "schema": CITIES, "strict": True}}


def test_a_chat_is_answered_alike(both: Both) -> None:
    assert both.chat(extra_body=PLAIN).choices[0].message.content
    assert both.chat(max_completion_tokens=4, extra_body=PLAIN).usage.completion_tokens == 4
    both.chat(
        messages=[{"role": "system", "content": "Be brief."}, *HELLO], user="me", store=False, metadata={"a": "b"}
    )


def test_what_is_left_open_is_what_vllm_takes(both: Both) -> None:
    fields: dict[str, Any] = {"temperature": 1, "seed": 5, "extra_body": {"max_tokens": None, **PLAIN}, "stop": ["e"]}
    assert both.chat(**fields).choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "options", [{"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}, None]
)
def test_a_stream_says_the_same(both: Both, options: dict[str, bool] | None) -> None:
    fields = {} if options is None else {"stream_options": options}
    said = both.stream(**fields, extra_body=PLAIN)
    assert said["choices"][0]["content"]
    assert (said["usage"] is not None) == (options is not None)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0, "seed": 7, "n": 3},
        {"temperature": 1.0, "seed": 7, "top_p": 0.5, "frequency_penalty": 0.5, "presence_penalty": 0.2},
        {"stop": ["o", "e"]},
        {"stop": "e", "extra_body": {"include_stop_str_in_output": True}},
        {"logit_bias": {"300": 100, "301": 99.5}},
        {"extra_body": {"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.3, "min_tokens": 4, "ignore_eos": True}},
        {"extra_body": {"allowed_token_ids": [300, 301, 302], "stop_token_ids": [302]}},
        {"extra_body": {"bad_words": [" maps", "gn"]}},
        {"extra_body": {"return_token_ids": True, "skip_special_tokens": False}},
        {"extra_body": {"prompt_logprobs": 2}},
        {"extra_body": {"priority": 3, "cache_salt": "pepper"}},
        {"reasoning_effort": "low"},
    ],
    ids=lambda fields: "-".join([*fields.get("extra_body", {}), *fields]).replace("-extra_body", ""),
)
def test_every_way_to_sample_gives_the_same(both: Both, fields: dict[str, Any]) -> None:
    body = {**PLAIN, **fields.get("extra_body", {})}
    both.chat(**{**fields, "extra_body": body}, cached=False)


@pytest.mark.parametrize("fields", [{}, {"n": 2, "seed": 3, "temperature": 1.0, "stop": ["zz"]}], ids=["one", "two"])
def test_a_long_answer_that_is_not_streamed_is_the_same_as_bare_vllm_s_and_as_a_stream(
    both: Both, fields: dict[str, Any]
) -> None:
    """It comes in strides of 16 tokens from the engine. Control: in a stream each token is an event of its own."""
    body = {**PLAIN, "ignore_eos": True, "return_token_ids": True}
    asked = {**fields, "max_tokens": 70, "extra_body": body}
    whole = both.chat(**asked)
    streamed = both.stream(**asked, stream_options={"include_usage": True})
    for choice in whole.choices:
        said = streamed["choices"][choice.index]
        assert said["content"] == choice.message.content
        assert said["token_ids"] == choice.token_ids
    assert streamed["usage"]["completion_tokens"] == whole.usage.completion_tokens


@pytest.mark.parametrize("body", [{}, {"return_tokens_as_token_ids": True}, {"logprob_token_ids": [300, 301]}])
@pytest.mark.parametrize("top", [0, 3])
def test_log_probabilities_are_the_same_whole_and_streamed(both: Both, top: int, body: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": top, "temperature": 1, "seed": 3}
    both.chat(**fields, extra_body={**PLAIN, **body})
    both.stream(**fields, extra_body={**PLAIN, **body, "return_token_ids": True})


def test_bytes_of_one_character_read_as_they_do_in_their_context(both: Both) -> None:
    """Tokens that are no text by themselves: a tokenizer asked for each of them alone would answer otherwise."""
    body = {**PLAIN, "structured_outputs": {"choice": ["é↦日本"]}}
    answer = both.chat(logprobs=True, top_logprobs=2, max_tokens=20, extra_body=body)
    assert answer.choices[0].message.content.startswith("é")
    both.stream(logprobs=True, max_tokens=20, extra_body=body)


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"response_format": SCHEMA}, '"city"'),
        ({"response_format": {"type": "json_object"}}, "{"),
        ({"response_format": {"type": "text"}}, ""),
        ({"extra_body": {"structured_outputs": {"choice": ["red", "blue"]}}}, ""),
        ({"extra_body": {"structured_outputs": {"regex": "[a-c]{3}"}}}, ""),
        ({"extra_body": {"structured_outputs": {"json": CITIES}}}, '"city"'),
        ({"extra_body": {"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}}}, ""),
    ],
    ids=["schema", "object", "text", "choice", "regex", "json", "grammar"],
)
def test_structured_outputs_are_held_to(both: Both, fields: dict[str, Any], form: str) -> None:
    fields = {**fields, "max_tokens": 60, "extra_body": {**PLAIN, **fields.get("extra_body", {})}}
    assert form in both.chat(**fields).choices[0].message.content
    both.stream(**fields)


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_call_that_is_forced_is_made_whole_and_streamed(both: Both, choice: Any) -> None:
    fields: dict[str, Any] = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 200, "extra_body": PLAIN}
    whole = both.chat(**fields, parallel_tool_calls=False).choices[0]
    (call,) = whole.message.tool_calls
    assert (call.function.name, whole.finish_reason) == ("weather", "tool_calls" if choice == "required" else "stop")
    streamed = both.stream(**fields, parallel_tool_calls=False)["choices"][0]
    assert streamed["tool_calls"][0]["name"] == "weather"
    assert streamed["tool_calls"][0]["has_id"]
    both.stream(**fields, stream_options={"include_usage": True})


@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_tools_that_need_not_be_called_do_not_change_the_answer_otherwise(both: Both, choice: str | None) -> None:
    fields: dict[str, Any] = {"tools": [WEATHER, NOW], "extra_body": PLAIN}
    fields |= {} if choice is None else {"tool_choice": choice}
    both.chat(**fields)
    both.stream(**fields)


def test_a_call_that_the_model_chooses_to_make_is_read(both: Both) -> None:
    """Pushed to open a call, the model is held to its form from there on."""
    fields: dict[str, Any] = {"tools": [{**NOW}], "tool_choice": "auto", "max_tokens": 60, "extra_body": PLAIN}
    fields |= {"logit_bias": {str(CALL_START): 100}, "parallel_tool_calls": False}
    (call,) = both.chat(**fields).choices[0].message.tool_calls
    assert call.function.name == "now"
    assert both.stream(**fields)["choices"][0]["tool_calls"][0]["name"] == "now"


def test_a_history_with_calls_and_their_results_is_rendered_alike(both: Both) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_call_id": "c1", "content": "noon"}]
    both.chat(messages=messages, tools=[NOW], extra_body={**PLAIN, "return_token_ids": True})


@pytest.mark.parametrize("included", [True, False])
def test_reasoning_is_told_apart_and_counted(both: Both, included: bool) -> None:
    body: dict[str, Any] = {"allowed_token_ids": [THINK_END, 300, 301, 302, 303], "include_reasoning": included}
    told = []
    for seed in range(6):
        fields: dict[str, Any] = {"temperature": 1, "seed": seed, "max_tokens": 24, "extra_body": body}
        fields["logit_bias"] = {str(THINK_END): seed - 2}
        told.append(both.chat(**fields, logprobs=True))
        both.stream(**fields, logprobs=True, stream_options={"include_usage": True})
    messages = [answer.choices[0].message for answer in told]
    assert any(message.content for message in messages)
    assert any(message.reasoning for message in messages) == included
    assert any(answer.usage.completion_tokens_details.reasoning_tokens for answer in told)


def test_a_picture_is_seen_alike_and_its_tokens_are_counted(both: Both) -> None:
    part = image_url(draw_image(np.random.default_rng(5)))
    messages = [{"role": "user", "content": [part, {**part, "uuid": "mine"}, {"type": "text", "text": "What?"}]}]
    answer = both.chat(messages=messages, extra_body=PLAIN)
    assert answer.usage.prompt_tokens_details.multimodal_tokens["image"] > 0
    both.stream(messages=messages, extra_body=PLAIN, stream_options={"include_usage": True})


def test_a_video_is_seen_alike_and_its_tokens_are_counted(both: Both) -> None:
    rng = np.random.default_rng(6)
    url = data_url(video(rng, seconds=2.5), "video/mp4")
    parts = [
        {"type": "video_url", "video_url": {"url": url}},
        image_url(draw_image(rng)),
        {"type": "text", "text": "?"},
    ]
    messages = [{"role": "user", "content": parts}]
    answer = both.chat(messages=messages, extra_body={**PLAIN, "return_token_ids": True}, logprobs=True, top_logprobs=3)
    assert answer.usage.prompt_tokens_details.multimodal_tokens["video"] > 0
    both.stream(messages=messages, extra_body=PLAIN, stream_options={"include_usage": True})


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "Hello"},
        {"prompt": [39, 546, 75, 78]},
        {"prompt": ["Hello", "you there"], "n": 2, "temperature": 1, "seed": 1},
        {"prompt": [[39, 546], [88, 268, 300]]},
        {"prompt": "Hello", "logprobs": 2},
        {"prompt": "Hello", "logprobs": 1, "echo": True},
        {"prompt": [39, 546, 75, 78], "echo": True, "max_tokens": 0, "logprobs": 0},
        {"prompt": "Hello", "extra_body": {"return_token_ids": True}},
        {"prompt": "Hello", "extra_body": {"structured_outputs": {"choice": ["red", "blue"]}}},
        {"prompt": "Hello", "extra_body": {"response_format": SCHEMA}, "max_tokens": 60},
        {"prompt": "Hello", "stop": ["a"], "max_tokens": 30},
    ],
)
def test_completions_go_on_alike_whole_and_streamed(both: Both, fields: dict[str, Any]) -> None:
    both.complete(**fields, cached=False)
    both.complete(**fields, stream=True, stream_options={"include_usage": True})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": "gpt-5"}, "gpt-5"),
        ({"max_tokens": 5_000}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "a b " * 5_000}]}, "tokens"),
        ({"messages": []}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"n": 0}, "n"),
        ({"logprobs": True, "top_logprobs": 100}, "logprobs"),
        ({"top_logprobs": 3}, "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream"),
        ({"tools": []}, "tools"),
        ({"tool_choice": "required"}, "tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": {"type": "nonsense"}}, "response_format"),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, ""),
        ({"extra_body": {"structured_outputs": {"regex": "a", "choice": ["b"]}}}, "structured"),
        ({"extra_body": {"chat_template": "{{ messages }}"}}, "template"),
        ({"extra_body": {"allowed_token_ids": [5_000]}}, "allowed_token_ids"),
        ({"messages": [{"role": "user", "content": [image_url(b"no picture")]}]}, ""),
    ],
    ids=lambda value: next(iter(value.get("extra_body", value))) if isinstance(value, dict) else "",
)
def test_what_vllm_refuses_is_refused_with_the_same_exception_and_says_why_S15(
    both: Both, fields: dict[str, Any], said: str
) -> None:
    error = both.refuse(**fields)
    assert said in str(error)
    assert both.served.ready()[0]


def test_what_vllm_ignores_and_would_answer_wrongly_is_refused_by_name(both: Both) -> None:
    """The control: bare vLLM answers, as if nothing had been asked."""
    for body, said in (({"guided_choice": ["red"]}, "structured_outputs"), ({"presense_penalty": 1}, "did you mean")):
        assert both.bare.chat.completions.create(**asked_of({"extra_body": body})).choices
        with pytest.raises(openai.BadRequestError, match=said):
            both.ours.chat.completions.create(**asked_of({"extra_body": body}))


def test_a_client_that_gives_up_is_told_so_and_its_request_is_aborted(both: Both) -> None:
    impatient = both.ours.with_options(timeout=0.5)
    with pytest.raises(openai.APITimeoutError):
        impatient.chat.completions.create(
            **asked_of({"max_tokens": 4_000, "extra_body": {"ignore_eos": True, **PLAIN}})
        )
    until(lambda: both.served.running() == 0, 10)
    chunks = both.ours.chat.completions.create(**asked_of({"max_tokens": 4_000, "stream": True, "extra_body": PLAIN}))
    next(iter(chunks))
    chunks.close()
    until(lambda: both.served.running() == 0, 10)


def test_the_answer_bears_the_id_that_the_client_wished_for(both: Both) -> None:
    for client in (both.ours, both.bare):
        create = client.chat.completions.create
        assert create(**asked_of({"extra_headers": {"X-Request-Id": "mine"}})).id == "chatcmpl-mine"
        assert create(**asked_of({"extra_body": {"request_id": "yours"}})).id == "chatcmpl-yours"


def test_a_batch_has_the_tokens_of_single_requests_to_both_servers_and_encodes_each_image_once(
    both: Both, tmp_path: Path
) -> None:
    images = [image_url(draw_image(np.random.default_rng(9_000 + number))) for number in range(4)]
    path, bodies = tmp_path / "in.jsonl", dict[str, Any]()
    for number in range(24):
        content = [images[number % 4], {"type": "text", "text": f"Question {number}"}]
        bodies[str(number)] = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 6}
    lines = [{"custom_id": name, "url": "/v1/chat/completions", "body": body} for name, body in bodies.items()]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    before = _images(both)
    command = [SEMEL, "batch", path, tmp_path / "out.jsonl", "--base-url", both.served.url, "--concurrency", "8"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert [new - old for new, old in zip(_images(both), before, strict=True)] == [4, 4]
    found = {one["custom_id"]: one for one in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    for name, body in bodies.items():
        for client in (both.ours, both.bare):
            answer = client.chat.completions.create(model=MODEL, **body).choices[0].message.content
            assert found[name]["response"]["body"]["choices"][0]["message"]["content"] == answer


def _images(both: Both) -> tuple[float, float]:
    """The images that were preprocessed, and those that were encoded."""
    worker = httpx.get(f"{both.admin_url}/metrics", timeout=30).text
    return both.served.metric("semel_pool_processed_total"), sum_of(worker, "semel_encoder_planned_total")
