"""S18: answers with tensors are in the budget until they are sent, and clients that do not read hold no more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import StreamingResponse

from semel.cache import LruCache
from semel.frontend.budget import Budget
from semel.frontend.http.download import Download, in_memory
from semel.frontend.limits import BudgetLimits
from semel.frontend.routes.render import SAFETENSORS
from semel.render import ChatRenderer
from tests.frontend.asgi import Exchange, stream_of
from tests.frontend.rig import Rig, rig
from tests.render.conftest import folder, parts_renderer
from tests.render.drawn import FEATURE_BYTES, Drawing, chat
from tests.waiting import until

__all__ = ["folder", "parts_renderer"]

RENDER = "/v1/chat/completions/render"
ITEMS = (1, 2, 3)
TENSOR_BYTES = len(ITEMS) * FEATURE_BYTES


@pytest.fixture
async def app(tmp_path: Path, parts_renderer: ChatRenderer) -> AsyncIterator[Rig]:
    async with rig(tmp_path, Drawing(parts_renderer, LruCache(8 * FEATURE_BYTES)).pipeline) as made:
        yield made


@dataclass
class Idle(Exchange):
    """A client that reads the head of its answer, and then nothing until it is told to."""

    reads: asyncio.Event = field(default_factory=asyncio.Event)

    async def _take(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.body":
            await self.reads.wait()
        await super()._take(message)


def ask(app: Rig, client: Exchange) -> asyncio.Task[None]:
    body = json.dumps({"messages": list(chat(*ITEMS).messages)}).encode()
    return asyncio.create_task(client.run(app.app, RENDER, stream_of([body]), {"accept": SAFETENSORS}))


async def test_answers_that_nobody_reads_are_in_the_budget_until_they_are_sent_or_left_S18(app: Rig) -> None:
    budget = app.service.budget
    reader, leaver = Idle(), Idle()
    tasks = [ask(app, reader), ask(app, leaver)]
    await until(lambda: reader.status == leaver.status == 200)
    sizes = [int(client.headers["content-length"]) for client in (reader, leaver)]
    assert budget.in_flight == sum(sizes) > 2 * TENSOR_BYTES
    assert budget.requests == 2
    leaver.leave.set()
    await tasks[1]
    assert (budget.in_flight, budget.requests) == (sizes[0], 1)
    reader.reads.set()
    await tasks[0]
    assert len(reader.body) == sizes[0]
    assert (budget.in_flight, budget.requests) == (0, 0)


async def test_an_answer_that_closes_its_account_when_it_exists_is_in_no_budget(
    app: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: what a plain response does."""

    class Naive(StreamingResponse):
        def __init__(self, pieces: AsyncIterator[memoryview], *_: object, media_type: str, within_s: float) -> None:
            del within_s
            super().__init__(pieces, media_type=media_type)

    monkeypatch.setattr("semel.frontend.routes.render.Download", Naive)
    clients = [Idle(), Idle()]
    tasks = [ask(app, client) for client in clients]
    await until(lambda: all(client.status == 200 for client in clients))
    assert app.service.budget.in_flight == 0
    for client in clients:
        client.leave.set()
    await asyncio.gather(*tasks)


async def test_tensors_over_what_is_left_are_refused_and_given_back_S18(app: Rig) -> None:
    app.service.budget = Budget(BudgetLimits(2 * TENSOR_BYTES, 2 * TENSOR_BYTES))
    first, second = Idle(), Exchange()
    held = ask(app, first)
    await until(lambda: first.status == 200)
    in_flight = app.service.budget.in_flight
    await ask(app, second)
    assert (second.status, second.code) == (429, "too_many_bytes")
    assert app.service.budget.in_flight == in_flight
    first.leave.set()
    await held
    app.service.budget = Budget(BudgetLimits(TENSOR_BYTES, TENSOR_BYTES))
    third = Exchange()
    await ask(app, third)
    assert (third.status, third.code) == (413, "media_too_large")
    assert app.service.budget.in_flight == 0


async def test_large_pieces_are_handed_over_a_little_at_a_time_S18() -> None:
    """What a server cannot send at once, it copies."""
    piece = bytes(range(256)) * 4_096
    with Budget().open() as account:
        pieces = in_memory([b"head", memoryview(piece)])
        answer = Download(pieces, 4 + len(piece), account, media_type=SAFETENSORS, within_s=5)
        chunks: list[bytes] = []

        async def send(message: MutableMapping[str, Any]) -> None:
            chunks.append(bytes(message.get("body", b"")))

        await answer({"type": "http", "asgi": {"spec_version": "2.4"}}, asyncio.Event().wait, send)  # type: ignore[arg-type]
    assert b"".join(chunks) == b"head" + piece
    assert max(map(len, chunks)) <= 256 * 1024
