"""Answers to chats: pure functions from an engine's outputs to OpenAI's JSON, whole and in chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from semel.core import Digest, Item, Output, Placeholder, Prompt, Timeline
from semel.frontend.api.openai.chat_response import ChatResponse, Head
from semel.frontend.api.shared.response_options import ResponseOptions

HEAD = Head("chatcmpl-r", "tiny", "semel-0", created=0)
TEXT = Prompt([1, 2, 3], Timeline.decoder([]), ())
SHOWN = Prompt(
    [1, *[9] * 4, 2, *[8] * 3],
    Timeline.decoder([Placeholder(1, 4), Placeholder(6, 3)]),
    (Item("image", Digest(b"i" * 32)), Item("audio", Digest(b"a" * 32))),
)


def answering(prompt: Prompt = TEXT, *, count: int = 1, options: ResponseOptions | None = None) -> ChatResponse:
    def decode(token_ids: Sequence[int]) -> str:
        return "".join(f"<{token}>" for token in token_ids)

    return ChatResponse(HEAD, prompt, decode, count=count, options=options or ResponseOptions())


def whole(*outputs: Output, **options: Any) -> Mapping[str, Any]:
    answer = answering(**options)
    for output in outputs:
        answer.add(output)
    return answer.whole()


def chunks(*outputs: Output, **options: Any) -> list[Mapping[str, Any]]:
    answer = answering(**options)
    return [*(chunk for output in outputs for chunk in answer.chunks(output)), *answer.closing()]


def test_what_parsers_read_goes_before_the_text() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    read = {"content": None, "reasoning": "hm", "tool_calls": [call]}
    last = Output(0, "…", (2,), finish_reason="tool_calls", message=read, reasoning_tokens=1)
    answer = whole(Output(0, "<think>", (1,)), last)
    assert answer["choices"][0]["message"] | read == answer["choices"][0]["message"]
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}


def test_usage_tells_cached_tokens_and_those_of_each_modality() -> None:
    first = Output(0, "a", (5,), cached_tokens=4, created_cache_tokens=2)
    usage = whole(first, Output(0, "b", (6,), finish_reason="stop"), prompt=SHOWN)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (9, 2, 11)
    assert usage["prompt_tokens_details"] == {
        "cached_tokens": 4,
        "created_cache_tokens": 2,
        "multimodal_tokens": {"image": 4, "audio": 3},
        "audio_tokens": 3,
    }
    assert usage["completion_tokens_details"] is None


def test_a_chunk_that_says_nothing_is_left_out_unless_its_tokens_are_shown() -> None:
    waiting, call = Output(0, "<", (1,), message={}), Output(0, "x", (2,), message={"content": "x"})
    assert len(chunks(waiting, call)) == 2
    shown = chunks(waiting, call, options=ResponseOptions(token_ids=True))
    assert [chunk["choices"][0].get("token_ids") for chunk in shown] == [None, (1,), (2,)]


def test_usage_closes_a_stream_or_runs_along() -> None:
    outputs = (Output(0, "a", (1,), cached_tokens=0), Output(0, "b", (2, 3), finish_reason="stop"))
    *_, last = chunks(*outputs, options=ResponseOptions(usage=True))
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 3,
        "total_tokens": 6,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    running = chunks(*outputs, options=ResponseOptions(usage=True, running_usage=True))
    assert [chunk["usage"]["completion_tokens"] for chunk in running] == [0, 1, 3, 3]


@pytest.mark.parametrize("read", [{"content": "x"}, {}])
def test_hidden_reasoning_cannot_be_read_from_tokens_or_log_probabilities(read: dict[str, str]) -> None:
    """Without a parser there is no reasoning, and nothing to hide."""
    options = ResponseOptions(logprobs=True, token_ids=True, reasoning=False)
    secret = Output(0, "x", (1,), ({1: -0.5},), "stop", message=read)
    choice = whole(secret, options=options)["choices"][0]
    assert (choice["logprobs"], choice["token_ids"]) == (None, None)
    *_, last = chunks(secret, options=options)
    assert (last["choices"][0]["logprobs"], last["choices"][0]["token_ids"]) == (None, None)
    plain = whole(Output(0, "x", (1,), ({1: -0.5},), "stop"), options=options)["choices"][0]
    assert (plain["token_ids"], len(plain["logprobs"]["content"])) == ([1], 1)


def test_log_probabilities_are_shown_in_the_order_and_number_asked_for() -> None:
    step = Output(0, "x", (7,), ({7: -2.0, 5: -0.5, 6: float("-inf")},), "stop", texts=({7: "é", 5: "b"},))

    def top(options: ResponseOptions) -> list[tuple[str, float]]:
        (entry,) = whole(step, options=options)["choices"][0]["logprobs"]["content"]
        return [(one["token"], one["logprob"]) for one in entry["top_logprobs"]]

    assert top(ResponseOptions(logprobs=True)) == []
    assert top(ResponseOptions(logprobs=True, top_logprobs=2)) == [("é", -2.0), ("b", -0.5)]
    assert top(ResponseOptions(logprobs=True, top_logprobs=None))[-1] == ("<6>", -9999.0)
    assert top(ResponseOptions(logprobs=True, top_logprobs=1, tokens_as_ids=True)) == [("token_id:7", -2.0)]
    (entry,) = whole(step, options=ResponseOptions(logprobs=True))["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("é", -2.0, [0xC3, 0xA9])
