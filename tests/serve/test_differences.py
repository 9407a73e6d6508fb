"""The comparison with bare vLLM can fail: what is not in its list is noticed."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from tests.serve.differences import DIFFERENCES, comparable, joined

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ANSWER: dict[str, Any] = {
    "id": "a",
    "created": 1,
    "system_fingerprint": "x",
    "choices": [{"index": 0, "message": {"content": "", "tool_calls": [CALL]}, "logprobs": None}],
    "usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": None}},
}
CHUNK = {"id": "a", "object": "o", "model": "m", "choices": [{"index": 0, "delta": {"content": "x", "role": "r"}}]}


def test_only_what_is_listed_may_differ() -> None:
    other = deepcopy(ANSWER) | {"id": "b", "created": 2, "system_fingerprint": "y"}
    other["choices"][0]["message"]["tool_calls"][0]["id"] = "c2"
    assert comparable(other) == comparable(ANSWER)
    other["usage"]["prompt_tokens_details"]["cached_tokens"] = 9
    assert comparable(other) != comparable(ANSWER)
    assert comparable(other, cached=False) == comparable(ANSWER, cached=False)
    del other["choices"][0]["logprobs"]
    assert comparable(other, cached=False) != comparable(ANSWER, cached=False)
    assert all(reason for reason in DIFFERENCES.values())


def test_a_stream_is_the_same_however_it_is_cut_and_not_if_a_word_is_missing() -> None:
    nothing, more = ({**CHUNK, "choices": [{"index": 0, "delta": {"content": text}}]} for text in ("", "y"))
    assert joined([CHUNK, nothing, more]) == joined([CHUNK, more])
    assert joined([CHUNK, more]) != joined([CHUNK])
