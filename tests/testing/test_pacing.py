"""The engine that generates at a steady rate."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from semel.core import Prompt, Submission, Timeline
from semel.errors import FeatureMissing
from semel.lab.testing.pacing import DeterministicEngine, PacedEngine, PacedStream
from tests.wire.examples import CONTRACT, digest_of
from tests.worker.pairing import feature, prompt

FAST = 500.0


def submission(number: int, tokens: int) -> Submission:
    return Submission(str(number), Prompt((1, 2), Timeline.decoder(()), ()), {}, {"max_tokens": tokens})


async def numbers(stream: PacedStream) -> list[int]:
    async with asyncio.timeout(30):
        return [int(output.text.partition("@")[0]) async for output in stream]


async def test_every_request_gets_all_its_words_in_order_and_then_an_end() -> None:
    engine = PacedEngine(CONTRACT, rate=FAST)
    streams = [await engine.submit(submission(number, 5)) for number in range(10)]
    assert await asyncio.gather(*map(numbers, streams)) == [list(range(5))] * 10
    assert (engine.running, engine.aborted) == (0, 0)


async def test_phases_take_turns_and_nobody_is_left_out() -> None:
    engine = PacedEngine(CONTRACT, rate=FAST, phases=3)
    streams = [await engine.submit(submission(number, 4)) for number in range(7)]
    assert await asyncio.gather(*map(numbers, streams)) == [list(range(4))] * 7


async def test_a_stream_that_is_closed_gets_no_more_and_the_engine_goes_on_later() -> None:
    engine = PacedEngine(CONTRACT, rate=FAST)
    stream = await engine.submit(submission(0, 10_000))
    await stream.close()
    assert (engine.running, engine.aborted) == (0, 1)
    assert await numbers(await engine.submit(submission(1, 3))) == [0, 1, 2]


async def test_a_deterministic_engine_answers_alike_in_any_process_and_loses_items_as_a_drifted_cache_does() -> None:
    made = feature(0)
    asked = Submission("a", prompt([0]), {digest_of(0): made}, {"max_tokens": 5, "n": 2})
    answers = []
    for _ in range(2):
        engine = DeterministicEngine(CONTRACT, rate=FAST)
        answers.append([output async for output in await engine.submit(asked)])
    assert answers[0] == answers[1]
    assert [output.index for output in answers[0]] == [0, 1] * 5
    other = DeterministicEngine(CONTRACT, rate=FAST)
    changed = replace(asked, features={digest_of(0): feature(1)})
    assert [output async for output in await other.submit(changed)] != answers[0]

    held = replace(asked, features={})
    with pytest.raises(FeatureMissing):
        for _ in range(100):
            assert [output async for output in await engine.submit(held)] == answers[0]
