"""How far two answers are apart: equal, a draw, or different."""

from __future__ import annotations

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from semel.lab.verify.answers import Answer, Refusal, distance, is_equal, reply_of, tolerance_of


def answer(tokens: tuple[int, ...], gaps: tuple[float, ...] = (), prompt: tuple[int, ...] = (1,)) -> Answer:
    """Each place has the token and a second one, which is less likely by a gap."""
    gaps = gaps or (5.0,) * len(tokens)
    places = tuple({str(token): -0.1, "other": -0.1 - gap} for token, gap in zip(tokens, gaps, strict=True))
    return Answer(prompt, tokens, places)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_an_answer_equals_itself_and_no_other(tokens: list[int]) -> None:
    one = answer(tuple(tokens))
    assert distance(one, one) == 0.0
    changed = answer((tokens[0] + 10, *tokens[1:]))
    assert math.isinf(distance(one, changed))
    assert math.isinf(distance(one, answer(tuple(tokens), prompt=(1, 1))))
    assert math.isinf(distance(one, answer((*tokens, 3))))


def test_what_follows_a_draw_is_not_compared() -> None:
    mine = Answer((1,), (4, 7), ({"four": -0.7, "five": -0.7001}, {"x": -1.0}))
    theirs = Answer((1,), (5, 8), ({"four": -0.7001, "five": -0.7}, {"y": -2.0}))
    assert is_equal(mine, theirs, 1e-3)
    assert not is_equal(mine, theirs, 1e-5)


def test_log_probabilities_count_even_where_tokens_agree() -> None:
    mine = Answer((1,), (4,), ({"four": -0.7},))
    theirs = Answer((1,), (4,), ({"four": -0.9},))
    assert not is_equal(mine, theirs, 0.1)
    assert is_equal(mine, theirs, 0.3)


def test_the_tolerance_is_what_vllm_differs_from_itself_by() -> None:
    assert tolerance_of([0.0, 0.0]) == tolerance_of([]) == 1e-4
    assert tolerance_of([0.0, 0.02]) == 0.06
    assert math.isinf(tolerance_of([0.4]))
    assert math.isinf(tolerance_of([math.inf]))


def test_refusals_and_servers_that_know_no_token_ids() -> None:
    assert reply_of(400, json.dumps({"error": {"message": "no"}}).encode()) == Refusal(400, "no")
    assert isinstance(reply_of(200, json.dumps({"choices": [{"message": {}}]}).encode()), Refusal)
    assert isinstance(reply_of(502, b"<html>"), Refusal)
    assert distance(Refusal(400, "a"), Refusal(422, "b")) == 0.0
    assert math.isinf(distance(Refusal(400, "a"), answer((1,))))
