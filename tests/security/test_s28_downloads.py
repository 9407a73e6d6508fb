"""S28: downloads of one tenant that are never read take no byte from another; what is sent is released."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest
from starlette.types import Message

from semel.errors import MediaStoreUnavailable, TooManyBytes
from semel.frontend.budget import Account, Budget
from semel.frontend.http import download
from semel.frontend.http.download import Download, in_memory
from semel.frontend.limits import BudgetLimits
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
    """With a pace that nobody is under as the control."""
    monkeypatch.setattr(download, "_GRACE_S", 0.2)
    monkeypatch.setattr(download, "MIN_BYTES_PER_S", pace)
    budget, client = Budget(), Reader(1)
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
