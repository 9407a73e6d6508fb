"""S21: answers are charged while they wait, for a slow reader or to be complete. Over a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from semel.core import Output, Submission
from semel.engine import Stream
from semel.fleet.stream import StreamedAnswer, output_bytes
from semel.frontend.limits import BudgetLimits
from semel.lab.testing.engine import EchoEngine
from semel.render import ChatRenderer
from tests.render.conftest import folder, parts_renderer
from tests.security.test_s21_shares import BODY, CHAT, KEYS, Frontend, frontend
from tests.waiting import until

__all__ = ["folder", "parts_renderer"]

COMPLETIONS = "/v1/completions"
OUTPUTS = 2_000
TEXT = "x" * 8_000
"""All of it is more than the buffers of a connection take."""

LOGPROBS = dict.fromkeys(range(20), -1.0)
TEXTS = dict.fromkeys(range(20), "word")


class Flood:
    """An answer of many large outputs, as fast as they are taken."""

    def __init__(self, count: int, logprobs: bool) -> None:
        self._count = count
        self._more: dict[str, Any] = {"logprobs": (LOGPROBS,), "texts": (TEXTS,)} if logprobs else {}

    async def __aiter__(self) -> AsyncIterator[Output]:
        for number in range(self._count):
            await asyncio.sleep(0)
            last = number == self._count - 1
            yield Output(0, "" if self._more else TEXT, (1,), finish_reason="length" if last else None, **self._more)

    async def close(self) -> None:
        pass


@pytest.fixture
def flooding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine answers requests with `top_k` 7 with a flood, with log probabilities if they want some."""
    submit = EchoEngine.submit

    async def flood(engine: EchoEngine, submission: Submission) -> Stream:
        if submission.sampling.get("top_k") != 7:
            return await submit(engine, submission)
        return Flood(OUTPUTS, bool(submission.sampling.get("logprobs")))

    monkeypatch.setattr(EchoEngine, "submit", flood)


async def request_without_reading(one: Frontend, tenant: str) -> asyncio.StreamReader:
    body = json.dumps({**BODY, "top_k": 7, "stream": True}).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEYS[tenant]}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", one.port, limit=1_024)
    writer.write(head.encode() + body)
    one.writers.append(writer)
    return reader


async def read_to_end(reader: asyncio.StreamReader) -> bytes:
    answer = bytearray()
    async with asyncio.timeout(30):
        while not answer.endswith(b"0\r\n\r\n"):
            answer += await reader.read(1 << 16)
    return bytes(answer)


@pytest.mark.usefixtures("flooding")
async def test_what_waits_for_a_slow_reader_is_charged_and_released_as_it_reads(
    folder: Path, parts_renderer: ChatRenderer
) -> None:
    limits = BudgetLimits(max_request_bytes=128 << 20, max_bytes=128 << 20)
    async with frontend(folder, parts_renderer, limits) as one:
        reader = await request_without_reading(one, "acme")
        await until(lambda: one.budget.in_flight > len(TEXT) * OUTPUTS)
        assert one.budget.requests == 0
        answer = await read_to_end(reader)
        assert answer.count(TEXT.encode()) == OUTPUTS
        assert b'"error"' not in answer
        await until(lambda: one.budget.in_flight == 0)


@pytest.mark.usefixtures("flooding")
async def test_a_reader_too_slow_for_the_budget_loses_its_answer_and_nobody_else_does(
    folder: Path, parts_renderer: ChatRenderer
) -> None:
    async with frontend(folder, parts_renderer) as one:
        reader = await request_without_reading(one, "acme")
        await until(lambda: any(it._has_overflowed for it in one.app.worker._streams.values()))
        assert one.budget.in_flight == 0, "it was dropped, although the client has not read a byte"
        answer = await read_to_end(reader)
        assert answer.count(TEXT.encode()) < OUTPUTS
        assert b'"too_many_bytes"' in answer
        assert (await one.post("acme", BODY)).status_code == 200


@pytest.mark.usefixtures("flooding")
async def test_what_waits_for_a_slow_reader_is_called_back_for_another_tenant(
    folder: Path, parts_renderer: ChatRenderer
) -> None:
    async with frontend(folder, parts_renderer, BudgetLimits(1 << 20, 128 << 20)) as one:
        reader = await request_without_reading(one, "acme")
        await until(lambda: one.budget.in_flight > len(TEXT) * OUTPUTS)
        waiting = -1
        while waiting != one.budget.in_flight:  # the flood has come
            waiting = one.budget.in_flight
            await asyncio.sleep(0.05)
        one.budget._bytes.shares.capacity = waiting  # as if that were all
        answer = await one.post("globex", BODY)
        assert answer.status_code == 200, answer.text
        assert b"each has an equal share" in await read_to_end(reader)
        assert one.budget.called_back == {("too_many_bytes", "acme"): 1}


@pytest.mark.usefixtures("flooding")
async def test_mutant_an_uncharged_backlog_grows_without_bound(
    folder: Path, parts_renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StreamedAnswer, "charge", lambda *_: None)
    async with frontend(folder, parts_renderer) as one:
        await request_without_reading(one, "acme")
        await until(lambda: any(len(it.outputs) > OUTPUTS // 2 for it in one.app.worker._streams.values()))
        assert one.budget.in_flight == 0


@pytest.mark.usefixtures("flooding")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {**BODY, "logprobs": True, "top_logprobs": 20}),
        (COMPLETIONS, {"prompt": "?", "logprobs": 20}),
    ],
)
async def test_an_answer_that_waits_to_be_complete_is_charged(
    folder: Path, parts_renderer: ChatRenderer, path: str, body: dict[str, Any]
) -> None:
    token = output_bytes(Output(0, "", (1,), (LOGPROBS,), texts=(TEXTS,)))
    assert token >= 5_600
    limits = BudgetLimits(max_request_bytes=2 * OUTPUTS * token, max_bytes=2 * OUTPUTS * token)
    async with frontend(folder, parts_renderer, limits) as one:
        answering = asyncio.create_task(one.post("acme", {**body, "top_k": 7}, path))
        most = 0
        while not answering.done():
            most = max(most, one.budget.in_flight)
            await asyncio.sleep(0)
        answer = answering.result()
        assert answer.status_code == 200, answer.text
        assert most >= OUTPUTS * token * 0.9
        await until(lambda: (one.budget.in_flight, one.budget.requests) == (0, 0))
