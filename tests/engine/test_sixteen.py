"""The sixteen probes: what they ask, and what counts as a difference."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import httpx
import pytest

from tests.engine.sixteen import SIXTEEN, ProbeAnswer, ask_sixteen, differences

ALIKE = [ProbeAnswer((1, 2), (-0.5, -0.25)) for _ in SIXTEEN]


def test_half_of_them_go_one_by_one_and_half_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    running, most, seen = 0, [], []

    async def reply(request: httpx.Request) -> httpx.Response:
        nonlocal running
        running += 1
        await asyncio.sleep(0.01)
        most.append(running)
        running -= 1
        seen.append(json.loads(request.content))
        choice = {"token_ids": [len(seen)], "logprobs": {"content": [{"logprob": -1.0}]}}
        return httpx.Response(200, json={"choices": [choice]})

    client = httpx.AsyncClient
    monkeypatch.setattr(httpx, "AsyncClient", lambda **options: client(transport=httpx.MockTransport(reply), **options))
    answers = asyncio.run(ask_sixteen("http://server"))

    assert most == [1] * 8 + [*range(8, 0, -1)]
    assert [answer.token_ids for answer in answers[:8]] == [(number,) for number in range(1, 9)]
    assert all(body["temperature"] == 0.0 and body["ignore_eos"] and body["return_token_ids"] for body in seen)
    assert [len(body["messages"][0]["content"]) for body in seen[:8]] == [2, 2, 2, 2, 2, 2, 3, 1]


def test_repeats_have_the_same_bytes_and_the_halves_share_none() -> None:
    first, second = ({image for probe in half for image in probe.images} for half in (SIXTEEN[:8], SIXTEEN[8:]))
    assert len(first) == len(second) == 3
    assert not first & second
    assert SIXTEEN[0].chat == SIXTEEN[1].chat != SIXTEEN[2].chat


def test_equal_answers_do_not_differ() -> None:
    assert differences(ALIKE, list(ALIKE), logprobs_within=0.0) == []


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"token_ids": (1, 3)}, "one by one: the same again: tokens [1, 2] / [1, 3]"),
        ({"token_ids": (1,)}, "one by one: the same again: tokens [1, 2] / [1]"),
        ({"fault": "500 no"}, "one by one: the same again: answered / 500 no"),
    ],
)
def test_another_token_or_a_fault_is_a_difference(change: dict[str, object], line: str) -> None:
    other = [*ALIKE[:1], replace(ALIKE[1], **change), *ALIKE[2:]]  # type: ignore[arg-type]
    assert differences(ALIKE, other) == [line]


def test_two_servers_that_both_fail_are_not_alike() -> None:
    failed = [ProbeAnswer(fault="refused") for _ in SIXTEEN]
    assert len(differences(failed, failed)) == len(SIXTEEN)


def test_log_probabilities_count_where_a_tolerance_is_named() -> None:
    other = [replace(answer, logprobs=(-0.5, -0.26)) for answer in ALIKE]
    assert differences(ALIKE, other) == []
    assert len(differences(ALIKE, other, logprobs_within=0.001)) == len(SIXTEEN)
    assert differences(ALIKE, other, logprobs_within=0.1) == []
