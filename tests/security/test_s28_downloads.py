"""S18, S28: downloads are in the budget until they are sent, and are cut off where another tenant needs its share."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.responses import StreamingResponse
from starlette.types import Message

from semel.errors import MediaStoreUnavailable, TooManyBytes
from semel.frontend.budget import Account, Budget
from semel.frontend.http import download
from semel.frontend.http.download import Download, in_memory
from semel.frontend.limits import BudgetLimits
from semel.frontend.routes.render import SAFETENSORS
from tests.frontend.asgi import Exchange, stream_of
from tests.frontend.rig import Rig
from tests.render.drawn import FEATURE_BYTES, chat
from tests.store.stores import in_memory as objects_in_memory
from tests.store.stores import store_over, upload_of
from tests.waiting import until

MIB = 1 << 20
CHUNK = 256 * 1024


class Reader:
    """A client over ASGI that takes as many chunks as it is allowed to."""

    def __init__(self, chunks: int = 0) -> None:
        self.received = bytearray()
        self._allowed = asyncio.Semaphore(chunks)

    def allow(self, chunks: int) -> None:
        for _ in range(chunks):
            self._allowed.release()

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.body" and message.get("body"):
            await self._allowed.acquire()
            self.received += message["body"]

    async def receive(self) -> Message:
        await asyncio.Event().wait()
        raise AssertionError


def start(account: Account, nbytes: int, client: Reader, within_s: float = 120.0) -> asyncio.Task[None]:
    account.take(nbytes)
    answer = Download(in_memory([bytes(nbytes)]), nbytes, account, media_type="x/y", within_s=within_s)
    return asyncio.create_task(answer({"type": "http", "asgi": {}}, client.receive, client.send))


async def end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_bytes_are_released_as_they_are_sent() -> None:
    budget, client = Budget(), Reader()
    task = start(budget.open("mallory"), MIB, client)
    await asyncio.sleep(0)
    assert budget.in_flight == MIB
    client.allow(2)
    await until(lambda: budget.in_flight == MIB - 2 * CHUNK)
    client.allow(2)
    await task
    assert (budget.in_flight, len(client.received)) == (0, MIB)


async def test_a_download_of_one_tenant_is_cut_off_when_another_needs_its_share() -> None:
    budget = Budget(BudgetLimits(max_request_bytes=8 * MIB, max_bytes=8 * MIB))
    clients = [Reader() for _ in range(4)]
    tasks = [start(budget.open("mallory"), 2 * MIB, client) for client in clients]
    await asyncio.sleep(0)
    assert budget.in_flight == 8 * MIB
    with budget.open("alice") as account:
        account.take(2 * MIB)  # 429 without the defence
        await until(lambda: tasks[-1].done())  # the newest one
        assert [task.done() for task in tasks] == [False, False, False, True]
        assert budget.by_tenant() == {"mallory": (6 * MIB, 3), "alice": (2 * MIB, 1)}
    assert not clients[-1].received
    await end(*tasks)


async def test_mutant_a_download_that_cannot_be_called_back_refuses_the_other_tenant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Committed(Account):
        def revocable(self) -> Any:
            return download.contextlib.nullcontext()  # type: ignore[attr-defined]

    monkeypatch.setattr(download, "contextlib", __import__("contextlib"), raising=False)
    monkeypatch.setattr(Account, "revocable", Committed.revocable)
    budget = Budget(BudgetLimits(max_request_bytes=8 * MIB, max_bytes=8 * MIB))
    tasks = [start(budget.open("mallory"), 2 * MIB, Reader()) for _ in range(4)]
    await asyncio.sleep(0)
    with budget.open("alice") as account, pytest.raises(TooManyBytes):
        account.take(2 * MIB)
    await end(*tasks)


@pytest.mark.parametrize("pace", [1 << 40, 1])
async def test_a_client_that_reads_too_slowly_is_cut_off(monkeypatch: pytest.MonkeyPatch, pace: int) -> None:
    """With a pace that nobody is under as the control. Its first chunk has all the time that it needs."""

    class Slow(Reader):
        async def send(self, message: MutableMapping[str, Any]) -> None:
            await super().send(message)
            if self.received:
                monkeypatch.setattr(download, "_GRACE_S", 0.2)

    monkeypatch.setattr(download, "_GRACE_S", 60.0)
    monkeypatch.setattr(download, "MIN_BYTES_PER_S", pace)
    budget, client = Budget(), Slow(1)
    task = start(budget.open("mallory"), MIB, client)
    if pace == 1:
        await asyncio.sleep(0.5)
        assert not task.done()
        await end(task)
    else:
        async with asyncio.timeout(30):
            await task
        assert len(client.received) == CHUNK
    assert budget.in_flight == 0


async def test_the_last_piece_of_a_file_that_has_changed_is_never_sent() -> None:
    objects = objects_in_memory()
    store = await store_over(objects)
    file = await store.put("acme", upload_of(bytes(2 * MIB)))
    ((path, _),) = [one async for page in objects.list("") for one in page]
    await objects.put(path, b"\1" + bytes(2 * MIB - 1))
    found = await store.stream("acme", file.id, lambda _: None)
    assert found is not None
    sent: list[bytes] = []
    with pytest.raises(MediaStoreUnavailable):
        async for piece in found[1]:
            sent.append(bytes(piece))  # noqa: PERF401 it raises
    assert len(sent) == 1


# Answers with tensors.

RENDER = "/v1/chat/completions/render"
ITEMS = (1, 2, 3)
TENSOR_BYTES = len(ITEMS) * FEATURE_BYTES


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
