"""Submissions and outputs as messages: nothing is lost on the way, and what is not said takes no room."""

from __future__ import annotations

import pytest
from msgspec.structs import fields

from semel.core import AnswerParsing, Output, PoolingOutput, Prompt, Submission, Timeline
from semel.wire.codec import FROM_FRONTEND, FROM_WORKER, decode, encode, pack
from semel.wire.limits import Limits
from semel.wire.messages import Deltas, Pooled, Submit
from semel.wire.outputs import to_delta, to_deltas, to_output
from semel.wire.translation import to_submission, to_submit

FULL = Output(
    1,
    "x",
    (5, 6),
    ({5: -0.5}, {6: float("-inf")}),
    "stop",
    "end",
    ({5: "a"}, {6: "b"}),
    {"content": None, "tool_calls": [{"index": 0}]},
    2,
    16,
    32,
    (None, {7: (-1.0, 3, "c"), 8: (-2.0, None, None)}),
    (("default", 0, 1), ("step-1", 1, 2)),
)


def travelled(output: Output) -> Output:
    frames = encode(1, 2, pack(Deltas((to_delta("r", output),)), Limits()), ())
    message = decode([bytes(frame) for frame in frames], FROM_WORKER, Limits()).message
    assert isinstance(message, Deltas)
    return to_output(message.deltas[0])


def test_an_output_arrives_as_it_was_sent() -> None:
    of_tokens = [field.name for field in fields(FULL) if field.name != "pooling"]
    assert all(getattr(FULL, name) for name in of_tokens), "a field that is empty proves nothing"
    assert travelled(FULL) == FULL
    assert travelled(Output(0, "", ())) == Output(0, "", ())
    assert to_delta("r", Output(0, "x", (1,), finish_reason="stop")).details is None


@pytest.mark.parametrize("rows", [1, 3, 40_000])
def test_what_was_pooled_arrives_as_it_was_sent_in_pieces_of_a_bounded_size(rows: int) -> None:
    pooling = PoolingOutput((rows, 4), bytes(range(256)) * (rows * 16 // 256) + bytes(rows * 16 % 256))
    messages = list(to_deltas("r", Output(0, "", (), finish_reason="stop", cached_tokens=5, pooling=pooling)))
    frames = [encode(1, 2, pack(message, Limits()), ()) for message in messages if isinstance(message, Pooled)]
    assert all(len(one[0]) < 300_000 for one in frames)
    decoded = [decode([bytes(part) for part in one], FROM_WORKER, Limits()).message for one in frames]
    outputs = [to_output(message) for message in decoded if isinstance(message, Pooled)]
    assert len(outputs) == len(messages) == -(-len(pooling.data) // 262_144)
    assert b"".join(one.pooling.data for one in outputs if one.pooling) == pooling.data
    assert {one.pooling.shape for one in outputs if one.pooling} == {(rows, 4)}
    assert [one.finish_reason for one in outputs] == [None] * (len(outputs) - 1) + ["stop"]
    assert [one.cached_tokens for one in outputs] == [5] + [None] * (len(outputs) - 1)


def test_a_submission_arrives_as_it_was_sent() -> None:
    parsing = AnswerParsing(
        tools=[{"type": "function"}],
        tool_choice={"type": "function"},
        parallel_tool_calls=False,
        past_tool_calls=3,
        response_format={"type": "text"},
        include_reasoning=False,
        reasoning_effort="low",
        template_kwargs={"enable_thinking": False},
        stream=True,
    )
    sampling = {"logit_bias": {5: 1.0}, "structured_outputs": {"choice": ["a"]}}
    prompt = Prompt([1, 2], Timeline.decoder([]), ())
    sent = Submission("r", prompt, {}, sampling, "salt", parsing=parsing, priority=-7)
    frames = encode(1, 2, pack(to_submit(sent), Limits()), ())
    message = decode([bytes(frame) for frame in frames], FROM_FRONTEND, Limits()).message
    assert isinstance(message, Submit)
    assert to_submission(message, prompt, {}) == sent
