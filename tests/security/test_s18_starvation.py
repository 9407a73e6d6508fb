"""S18: one request cannot take the memory or the time that the others need (vLLM #35191).

The rules of the budget are in `tests/frontend/test_budget_shares.py`, every limit with its answer in
`tests/frontend/test_limits.py`, and latency beside hostile requests in `test_s18_fairness.py`.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from semel.core import Feature, Media
from semel.errors import InvalidRequest, MediaUndecodable, SemelError
from semel.frontend.budget import Budget
from semel.frontend.http.body import BodyLimits, read
from semel.frontend.limits import BudgetLimits
from semel.frontend.middleware.refusal_rate import RefusalLimits
from semel.render import Tokenizer, source_from
from tests.frontend.asgi import Exchange, stream_of
from tests.frontend.rig import MAX_IMAGES, Rig, rig
from tests.render.drawn import Drawing, chat, drawn, image_part
from tests.waiting import until

CHAT = "/v1/chat/completions"
MIB = 1024**2
CHUNK = bytes(65_536)


class _Pool:
    """Takes its time, and cannot decode every seventh item."""

    async def process(self, media: Media, _: Mapping[str, object], **__: object) -> Feature:
        await asyncio.sleep(0.002)
        if int(media.data) % 7 == 0:
            raise MediaUndecodable("the image is damaged")
        return drawn(media)


@pytest.fixture
async def app(tmp_path: Path, drawing: Drawing) -> AsyncIterator[Rig]:
    async with rig(tmp_path, replace(drawing.pipeline, process=_Pool().process)) as made:
        yield made


def body(*numbers: int, **fields: object) -> bytes:
    return json.dumps({"messages": list(chat(*numbers).messages), **fields}).encode()


async def ended(app: Rig, data: bytes, *, leave_after_s: float | None = None, path: str = CHAT) -> str:
    """Send a request, and go away after a while if it is said; what came of it."""
    exchange = Exchange()
    running = asyncio.create_task(exchange.run(app.app, path, stream_of([data[:50], data[50:]])))
    if leave_after_s is not None:
        await asyncio.sleep(leave_after_s)
        exchange.leave.set()
    await running
    return str(exchange.status)


async def broken_off(app: Rig) -> str:
    """The client goes away in the middle of its body."""

    async def chunks() -> AsyncIterator[bytes]:
        yield body(1)[:40]

    exchange = Exchange()
    exchange.leave.set()
    await exchange.run(app.app, CHAT, chunks(), ends=False)
    return str(exchange.status)


def requests_of(app: Rig) -> list[Callable[[int], Awaitable[str]]]:
    """All ways that a request can go."""
    return [
        lambda n: ended(app, body(n)),
        lambda n: ended(app, body(n, stream=True)),
        lambda n: ended(app, body(n), path=f"{CHAT}/render"),
        lambda n: ended(app, body(7 * n)),
        lambda n: ended(app, body(n, n + 1, stream=True), leave_after_s=0.001),
        lambda n: ended(app, body(n, n + 1), leave_after_s=0.003),
        lambda n: ended(app, body(n, stream=True), leave_after_s=0.01),
        lambda n: ended(app, body(*range(MAX_IMAGES + 1 + n % 3))),
        lambda n: ended(app, body(n, model="another")),
        lambda n: ended(app, body(n)[:-3]),
        lambda n: ended(app, body(n, nonsense=n)),
        lambda n: ended(app, body(n) + b" " * 70_000),
        lambda n: ended(app, body(n).replace(b"base64,", b"base64,%")),
        lambda _: ended(app, b'{"messages": ' + b"[" * 500),
        lambda _: ended(app, b'{"prompt": "hello"}', path="/v1/completions"),
        lambda _: ended(app, b'{"prompt": ["hello", "there"], "stream": true}', path="/v1/completions"),
        lambda _: broken_off(app),
    ]


async def test_after_a_thousand_requests_that_went_all_ways_nothing_is_held(app: Rig) -> None:
    app.service.body = BodyLimits(max_bytes=65_536)
    app.service.refusals = RefusalLimits(per_s=0)
    budget = app.service.budget
    ways = requests_of(app)
    seed = random.Random(18)
    most = 0
    statuses: Counter[str] = Counter()
    room = asyncio.Semaphore(32)

    async def one(number: int) -> None:
        nonlocal most
        async with room:
            statuses[await ways[number % len(ways)](seed.randrange(1, 1_000))] += 1
            most = max(most, budget.in_flight)

    async with asyncio.timeout(100), asyncio.TaskGroup() as group:
        for number in range(1_000):
            group.create_task(one(number))
    assert most > 0
    assert statuses.keys() >= {"200", "400", "413", "499"}, statuses
    assert (budget.in_flight, budget.requests) == (0, 0), statuses
    assert app.engine.submissions > 100


async def test_a_naive_account_that_is_closed_at_the_end_leaks_what_failed_or_went_away() -> None:
    budget = Budget(BudgetLimits(1_000, 1_000_000))

    async def naive(work: Awaitable[None]) -> None:
        account = budget.open()
        account.take(10)
        await work
        account.close()

    async def fail() -> None:
        raise MediaUndecodable("no")

    async def wait() -> None:
        await asyncio.Event().wait()

    gone = asyncio.create_task(naive(wait()))
    await asyncio.sleep(0)
    gone.cancel()
    results = await asyncio.gather(naive(fail()), gone, naive(asyncio.sleep(0)), return_exceptions=True)
    assert [type(result) for result in results] == [MediaUndecodable, asyncio.CancelledError, type(None)]
    assert (budget.in_flight, budget.requests) == (20, 2)


async def read_naively(request: Request, max_bytes: int) -> bytes:
    """A limit for each request, and none for all of them."""
    whole = b""
    async for chunk in request.stream():
        whole += chunk
        assert len(whole) <= max_bytes
    return whole


@pytest.mark.parametrize("naive", [True, False])
async def test_bodies_that_stall_together_hold_no_more_than_the_process_may(naive: bool) -> None:
    """Sixteen clients send most of a body each, and then nothing."""
    budget = Budget(BudgetLimits(max_request_bytes=2 * MIB, max_bytes=4 * MIB))
    stalled = asyncio.Event()
    refused = stalling = 0

    async def attack() -> None:
        nonlocal refused
        rest = [CHUNK] * 16

        async def receive() -> dict[str, Any]:
            nonlocal stalling
            if rest:
                return {"type": "http.request", "body": rest.pop(), "more_body": True}
            stalling += 1
            await stalled.wait()
            return {"type": "http.request", "body": b"", "more_body": False}

        request = Request({"type": "http", "method": "POST", "headers": []}, receive)
        with budget.open() as account:
            try:
                if naive:
                    await read_naively(request, 2 * MIB)
                else:
                    await read(request, BodyLimits(), account)
            except SemelError:
                refused += 1

    tracemalloc.start()
    attacks = [asyncio.create_task(attack()) for _ in range(16)]
    await until(lambda: stalling + refused == 16)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    stalled.set()
    await asyncio.gather(*attacks)
    del attacks
    assert (held > 8 * MIB) == naive
    assert (refused == 0) == naive
    assert budget.in_flight == 0


def test_json_of_many_small_values_takes_many_times_its_bytes_and_ours_are_charged_for() -> None:
    values = 200_000
    text = b"[" + b"{}," * values + b"{}]"
    tracemalloc.start()
    parsed = json.loads(text)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(parsed) == values + 1
    assert held > 20 * len(text)

    async def received() -> int:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": text, "more_body": False}

        with Budget().open() as account:
            request = Request({"type": "http", "method": "POST", "headers": []}, receive)
            await read(request, BodyLimits(max_values=1 << 30), account)
            return account.charged

    assert asyncio.run(received()) >= held


async def test_beside_a_request_with_very_many_items_another_is_not_kept_waiting(app: Rig) -> None:
    """Groups take turns in the pool (`tests/fairness/test_queue.py`), and the contract bounds the items."""
    many = {"messages": [{"role": "user", "content": [image_part(number) for number in range(5_000)]}]}
    attack = asyncio.create_task(app.post(CHAT, many))
    assert (await app.post(CHAT, json.loads(body(1)))).status_code == 200
    assert (await attack).status_code == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a b " * 300_000}),
        ("/v1/completions/render", {"prompt": "a b " * 300_000}),
        ("/tokenize", {"prompt": "a b " * 300_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a b " * 300_000}]}),
        ("/tokenize", {"messages": [{"role": "user", "content": "a b " * 300_000}]}),
    ],
)
async def test_a_text_longer_than_any_prompt_is_refused_before_tokens_are_made_of_it(
    app: Rig, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making tokens of a text takes 200 times its memory (`test_s21_texts`)."""
    monkeypatch.setattr(Tokenizer, "_encode", None)
    status, message = await app.refused(path, body)
    assert status == 400
    assert "1,200,00" in message


async def test_a_body_of_faults_costs_as_little_as_one_fault(app: Rig) -> None:
    faults = {str(number) + "x": "?" for number in range(5_000)}
    status, message = await app.refused("/v1/completions", {"prompt": "a", "logit_bias": faults})
    assert status == 400
    assert "10,000 faults" in message or "5,000 faults" in message


@pytest.mark.alone
def test_a_data_url_of_separators_is_not_taken_apart() -> None:
    url = "data:" + ";abcd" * 1_000_000
    begin = time.process_time()
    with pytest.raises(InvalidRequest, match="is not of the form"):
        source_from(url, "image", where="messages[0]")
    taken_s = time.process_time() - begin
    begin = time.process_time()
    assert len([field.strip() for field in url.split(";")]) == 1_000_001  # the naive way
    assert taken_s < (time.process_time() - begin) / 10
