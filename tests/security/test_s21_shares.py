"""S21: while others ask, one tenant has no more than a share of a frontend's bytes and places. Over a real socket.

The rules of the budget are in `tests/frontend/test_budget_shares.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from semel.cache import LruCache
from semel.core import Feature, Keyring, Media, Output, Submission
from semel.engine import Stream
from semel.fairness.shares import Claims
from semel.fleet.stream import StreamedAnswer, output_bytes
from semel.frontend.budget import Account, Budget
from semel.frontend.limits import BudgetLimits
from semel.frontend.middleware.refusal_rate import RefusalLimits
from semel.lab.testing.engine import EchoEngine
from semel.render import ChatRenderer
from tests.frontend.rig import Rig, rig
from tests.render.drawn import FEATURE_BYTES, Drawing, chat, drawn
from tests.waiting import until
from tests.web.test_server import served

KEYS = {"acme": "acme-0123456789abcdef", "globex": "globex-0123456789abcdef"}
CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "?"}]}
LIMITS = BudgetLimits(max_request_bytes=1 << 20, max_bytes=4 << 20, max_requests=16)
STALLED_BYTES = (1 << 20) - 4_096


class Greedy(Claims[Account]):
    """The wrong implementation: first come, first served."""

    def to_revoke(self, tenant: str, amount: int) -> Sequence[Account] | None:  # noqa: ARG002
        return () if self.shares.fits(amount) else None


@dataclass
class Frontend:
    """A frontend on a socket, with two tenants."""

    app: Rig
    port: int
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    @property
    def budget(self) -> Budget:
        return self.app.service.budget

    async def post(self, tenant: str, body: dict[str, Any], path: str = CHAT) -> httpx.Response:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=30) as client:
            return await client.post(path, json=body, headers={"authorization": f"Bearer {KEYS[tenant]}"})

    async def stall(self, tenant: str, nbytes: int) -> asyncio.StreamReader:
        """Send most of a body, and then nothing."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEYS[tenant]}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {nbytes + 1}\r\n\r\n"
        )
        writer.write(head.encode() + b" " * nbytes)
        await writer.drain()
        self.writers.append(writer)
        return reader

    def leave(self) -> None:
        for writer in self.writers:
            writer.close()


@asynccontextmanager
async def frontend(folder: Path, renderer: ChatRenderer, limits: BudgetLimits = LIMITS) -> AsyncIterator[Frontend]:
    async with AsyncExitStack() as stack:
        pipeline = Drawing(renderer, LruCache(8 * FEATURE_BYTES)).pipeline
        app = await stack.enter_async_context(rig(folder, pipeline, keys=Keyring(KEYS.items())))
        app.service.budget = Budget(limits)
        app.service.refusals = RefusalLimits(per_s=0)
        server = await stack.enter_async_context(served(app.app))
        made = Frontend(app, server.port)
        stack.callback(made.leave)
        yield made


async def error_of(reader: asyncio.StreamReader) -> tuple[bytes, dict[str, Any]]:
    async with asyncio.timeout(10):
        head = await reader.readuntil(b"\r\n\r\n")
        line = next(one for one in head.lower().split(b"\r\n") if one.startswith(b"content-length"))
        body = await reader.readexactly(int(line.partition(b":")[2]))
    error: dict[str, Any] = json.loads(body)["error"]
    return head.lower(), error


async def fill_with_bodies(one: Frontend) -> list[asyncio.StreamReader]:
    """Four stalled bodies of a tenant fill the budget."""
    readers = [await one.stall("acme", STALLED_BYTES) for _ in range(4)]
    await until(lambda: one.budget.in_flight == 4 * STALLED_BYTES)
    return readers


async def test_beside_four_stalled_bodies_of_a_tenant_another_s_chat_is_answered(
    folder: Path, parts_renderer: ChatRenderer
) -> None:
    picture = {"messages": list(chat(1).messages), "user": "x" * 100_000}
    async with frontend(folder, parts_renderer) as one:
        readers = await fill_with_bodies(one)
        answer = await one.post("globex", picture)
        assert answer.status_code == 200, answer.text
        head, error = await error_of(readers[-1])  # the newest
        assert head.startswith(b"http/1.1 429 ")
        assert b"retry-after: " in head
        assert error["code"] == "too_many_bytes"
        assert "while other tenants ask, each has an equal share" in error["message"]
        assert one.budget.called_back == {("too_many_bytes", "acme"): 1}
        assert one.budget.by_tenant() == {"acme": (3 * STALLED_BYTES, 3)}  # the other three are left alone
        called_back = {'semel_requests_called_back_total{code="too_many_bytes"}': "1.0"}
        assert one.app.metrics("semel_requests_called_back_total") == called_back
        assert one.app.metrics("semel_tenant") == {}, "only if the operator wants them"
        one.app.service.metrics_per_tenant = True
        samples = {name: float(value) for name, value in one.app.metrics("semel_tenant").items()}
        assert samples == {
            'semel_tenant_media_in_flight_bytes{tenant="acme"}': 3 * STALLED_BYTES,
            'semel_tenant_requests_waiting{tenant="acme"}': 3,
            'semel_tenant_requests_called_back_total{tenant="acme"}': 1,
        }


async def test_mutant_first_come_first_served_the_other_s_chat_is_refused(
    folder: Path, parts_renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semel.frontend.budget.Claims", Greedy)
    async with frontend(folder, parts_renderer) as one:
        await fill_with_bodies(one)
        answer = await one.post("globex", {**BODY, "user": "x" * 100_000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_bytes")


@pytest.mark.parametrize("feature_bytes", [1 << 20, LIMITS.max_bytes + 1])
async def test_features_that_have_no_room_in_shared_memory_are_charged_until_they_are_sent(
    folder: Path, parts_renderer: ChatRenderer, feature_bytes: int
) -> None:
    charged: list[int] = []

    async def process(
        media: Media, _: Mapping[str, object], *, spend: Callable[[int], None] | None = None, **__: object
    ) -> Feature:
        assert spend is not None
        spend(feature_bytes)
        charged.append(app.service.budget.in_flight)
        return drawn(media)

    pipeline = replace(Drawing(parts_renderer, LruCache(8 * FEATURE_BYTES)).pipeline, process=process)
    async with rig(folder, pipeline) as app:
        app.service.budget = Budget(LIMITS)
        answer = await app.post(CHAT, {"messages": list(chat(1, 2).messages)})
        assert app.service.budget.in_flight == 0
    if feature_bytes > LIMITS.max_bytes:
        assert (answer.status_code, charged) == (413, [])
        assert "--feature-cache-gb" in answer.json()["error"]["message"]
    else:
        assert answer.status_code == 200, answer.text
        assert max(charged) > 2 * feature_bytes


# Answers are charged while they wait, for a slow reader or to be complete.

COMPLETIONS = "/v1/completions"
OUTPUTS = 2_000
TEXT = "x" * 8_000
"""All of it is more than the buffers of a connection take."""

LOGPROBS = dict.fromkeys(range(20), -1.0)
TEXTS = dict.fromkeys(range(20), "word")
PROMPT_LOGPROBS = tuple(dict.fromkeys(range(20), (-1.0, 1, "word")) for _ in range(1_000))
TOKEN_BYTES = output_bytes(Output(0, "", (1,), (LOGPROBS,), texts=(TEXTS,)))
PROMPT_BYTES = output_bytes(Output(0, "", (1,), prompt_logprobs=PROMPT_LOGPROBS))


class Flood:
    """An answer of many large outputs, as fast as they are taken."""

    def __init__(self, count: int, logprobs: bool, prompt_logprobs: bool) -> None:
        self._count = count
        self._more: dict[str, Any] = {"logprobs": (LOGPROBS,), "texts": (TEXTS,)} if logprobs else {}
        self._of_prompt: dict[str, Any] = {"prompt_logprobs": PROMPT_LOGPROBS} if prompt_logprobs else {}

    async def __aiter__(self) -> AsyncIterator[Output]:
        for number in range(self._count):
            await asyncio.sleep(0)
            last = number == self._count - 1
            text = "" if self._more or self._of_prompt else TEXT
            more = self._more if number else {**self._more, **self._of_prompt}
            yield Output(0, text, (1,), finish_reason="length" if last else None, **more)

    async def close(self) -> None:
        pass


@pytest.fixture
def flooding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine answers requests with `top_k` 7 with a flood, with log probabilities if they want some."""
    submit = EchoEngine.submit

    async def flood(engine: EchoEngine, submission: Submission) -> Stream:
        if submission.sampling.get("top_k") != 7:
            return await submit(engine, submission)
        wanted = submission.sampling
        return Flood(OUTPUTS, bool(wanted.get("logprobs")), bool(wanted.get("prompt_logprobs")))

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
        await until(lambda: not any(it._unfinished for it in one.app.worker._streams.values()))  # the flood has come
        waiting = -1
        while waiting != one.budget.in_flight:  # and the connection takes no more of it
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
    ("path", "body", "nbytes"),
    [
        (CHAT, {**BODY, "logprobs": True, "top_logprobs": 20}, OUTPUTS * TOKEN_BYTES),
        (COMPLETIONS, {"prompt": "?", "logprobs": 20}, OUTPUTS * TOKEN_BYTES),
        (CHAT, {**BODY, "prompt_logprobs": 20}, PROMPT_BYTES),
        (COMPLETIONS, {"prompt": "?", "prompt_logprobs": 20}, PROMPT_BYTES),
    ],
)
async def test_an_answer_that_waits_to_be_complete_is_charged(
    folder: Path, parts_renderer: ChatRenderer, path: str, body: dict[str, Any], nbytes: int
) -> None:
    """The log probabilities of a prompt are in the first output, which comes with the acceptance."""
    assert TOKEN_BYTES >= 5_600
    limits = BudgetLimits(max_request_bytes=2 * OUTPUTS * TOKEN_BYTES, max_bytes=2 * OUTPUTS * TOKEN_BYTES)
    async with frontend(folder, parts_renderer, limits) as one:
        answering = asyncio.create_task(one.post("acme", {**body, "top_k": 7}, path))
        most = 0
        while not answering.done():
            most = max(most, one.budget.in_flight)
            await asyncio.sleep(0)
        answer = answering.result()
        assert answer.status_code == 200, answer.text
        assert most >= nbytes * 0.9
        await until(lambda: (one.budget.in_flight, one.budget.requests) == (0, 0))


@pytest.mark.usefixtures("flooding")
async def test_what_comes_with_the_acceptance_and_has_no_room_ends_the_answer(
    folder: Path, parts_renderer: ChatRenderer
) -> None:
    limits = BudgetLimits(max_request_bytes=PROMPT_BYTES // 2, max_bytes=PROMPT_BYTES // 2)
    async with frontend(folder, parts_renderer, limits) as one:
        answer = await one.post("acme", {**BODY, "prompt_logprobs": 20, "top_k": 7})
        assert "the complete answer takes more than" in answer.json()["error"]["message"]
        await until(lambda: (one.budget.in_flight, one.budget.requests) == (0, 0))
