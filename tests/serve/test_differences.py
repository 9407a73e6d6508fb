"""The comparison with bare vLLM can fail: whatever is not in its list is noticed."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from tests.serve.differences import comparable, joined

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ANSWER: dict[str, Any] = {
    "id": "a",
    "created": 1,
    "system_fingerprint": "x",
    "choices": [{"index": 0, "message": {"content": "", "tool_calls": [CALL]}, "logprobs": None}],
    "usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": None}},
}
CHUNKS: list[dict[str, Any]] = [
    {"id": "a", "object": "o", "model": "m", "choices": [{"index": 0, "delta": {"content": "x", "role": "r"}}]},
    {
        "id": "a",
        "object": "o",
        "model": "m",
        "choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, **CALL}]}}],
    },
]


@pytest.mark.parametrize("path", ["choices.0.logprobs", "choices.0.message.tool_calls.0.function.name"])
def test_a_field_that_differs_is_noticed(path: str) -> None:
    changed = deepcopy(ANSWER)
    *names, last = path.split(".")
    place: Any = changed
    for name in names:
        place = place[int(name) if name.isdigit() else name]
    place[last] = "other"
    assert comparable(changed) != comparable(ANSWER)
    del place[last]
    assert comparable(changed) != comparable(ANSWER)


def test_a_stream_is_the_same_however_it_is_cut_and_not_if_a_word_is_missing() -> None:
    cut = deepcopy(CHUNKS)
    cut.insert(1, {**CHUNKS[0], "choices": [{"index": 0, "delta": {"content": ""}}]})
    assert joined(cut) == joined(CHUNKS)
    cut[1]["choices"][0]["delta"]["content"] = "y"
    assert joined(cut) != joined(CHUNKS)
    assert joined(CHUNKS[:1]) != joined(CHUNKS)
