"""S30: operations of the media store without bytes are bounded, by tenant and in all; an unknown file ends a search."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from obstore.store import MemoryStore

from semel.cache import NoCache
from semel.core import Tenant
from semel.errors import UnknownMedia
from semel.render import ChatRenderer, ChatRequest
from semel.render.file_sources import FileSources
from semel.store import objects as objects_module
from semel.store.objects import BucketObjects
from semel.store.upload import FRONTEND, Payer
from tests.render.conftest import folder, parts_renderer
from tests.render.drawn import Drawing, image_part
from tests.store.stores import FaultyObjects, bindings_over, in_memory, store_over, upload_of
from tests.waiting import until

__all__ = ["folder", "parts_renderer"]

ACME = Tenant("acme")


class SlowBucket(MemoryStore):
    """A bucket that answers a listing when it is woken."""

    def __init__(self) -> None:
        self.woken = asyncio.Event()
        self.waiting: list[str] = []

    async def pages(self, prefix: str) -> AsyncIterator[Any]:
        self.waiting.append(prefix)
        await self.woken.wait()
        self.waiting.remove(prefix)
        for page in tuple[Any, ...]():
            yield page

    def list(self, prefix: str | None = None, **_: Any) -> Any:
        return self.pages(prefix or "")


class SlowReads(FaultyObjects):
    """Objects that take a moment to be read."""

    most = 0
    reading = 0

    async def get(self, path: str, nbytes: int, *, start: int = 0, payer: Payer = FRONTEND) -> memoryview | None:
        self.reading += 1
        self.most = max(self.most, self.reading)
        for _ in range(20):
            await asyncio.sleep(0)
        self.reading -= 1
        return await super().get(path, nbytes, start=start, payer=payer)


async def list_all(objects: BucketObjects, owner: str, number: int) -> None:
    async for _ in objects.list(f"{owner}/{number}", payer=Payer(owner)):
        pass


async def waiting_at_the_bucket(monkeypatch: pytest.MonkeyPatch, *, per_tenant: int, in_all: int) -> tuple[int, bool]:
    """How many of mallory's 150 listings are at the bucket, and whether alice's gets there next to them."""
    monkeypatch.setattr(objects_module, "_MAX_TENANT_OPERATIONS", per_tenant)
    monkeypatch.setattr(objects_module, "_MAX_OPERATIONS", in_all)
    bucket = SlowBucket()
    objects = BucketObjects(bucket, timeout_s=60.0)
    async with asyncio.TaskGroup() as group:
        for number in range(150):
            group.create_task(list_all(objects, "mallory", number))
        await until(lambda: len(bucket.waiting) >= min(per_tenant, in_all))
        group.create_task(list_all(objects, "alice", 0))
        for _ in range(10):
            await asyncio.sleep(0)
        seen = [prefix.partition("/")[0] for prefix in bucket.waiting]
        bucket.woken.set()
    return seen.count("mallory"), "alice" in seen


async def test_one_tenant_s_listings_are_bounded_and_another_s_do_not_wait_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert await waiting_at_the_bucket(monkeypatch, per_tenant=16, in_all=64) == (16, True)


async def test_mutant_without_a_bound_by_tenant_one_tenant_takes_all_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert await waiting_at_the_bucket(monkeypatch, per_tenant=1_000, in_all=64) == (64, False)


async def test_an_operation_that_is_given_up_counts_until_it_has_ended() -> None:
    bucket = SlowBucket()
    objects = BucketObjects(bucket, timeout_s=60.0)
    task = asyncio.create_task(list_all(objects, "mallory", 0))
    await until(lambda: len(bucket.waiting) == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert objects._operations["mallory"] == 1
    bucket.woken.set()
    await until(lambda: objects._operations["mallory"] == 0)


@pytest.mark.parametrize(("known", "listings"), [(0, 1), (1, 3), (64, 64)])
async def test_a_chat_that_names_unknown_files_costs_one_listing_for_the_first(known: int, listings: int) -> None:
    """With as many files that are there as the control: they are all looked for."""
    objects = FaultyObjects(in_memory())
    store = await store_over(objects)
    uploaded = [await store.put("acme", upload_of(b"image %d" % number)) for number in range(64)]
    ids = sorted((f"file-{file.id.hex()}", file.id) for file in uploaded)
    for _, digest in ids[known:]:
        await store.delete("acme", digest)
    objects.calls.clear()
    other = await store_over(objects)  # a frontend that has seen none of them
    objects.calls.clear()
    other._index = type(other._index)(1 << 30)
    parts = [{"type": "file", "file": {"file_id": text}} for text, _ in ids]
    found = await FileSources(other).locate([{"role": "user", "content": parts}], Tenant("acme"))
    assert (len(found), objects.calls.count("list")) == (known, listings)


@pytest.mark.parametrize(("known", "reads"), [(50, 50), (20, 20 + 12 * 2), (0, 16 * 2)])
async def test_names_are_read_in_batches_up_to_the_first_that_nobody_knows(
    parts_renderer: ChatRenderer, known: int, reads: int
) -> None:
    """At another frontend than the one that they were sent to; with 50 that are known as the control."""
    objects = SlowReads(in_memory())
    one, other = [Drawing(parts_renderer, NoCache()).pipeline for _ in range(2)]
    one = replace(one, files=FileSources.of(None, await bindings_over(objects)))
    other = replace(other, files=FileSources.of(None, await bindings_over(objects)))
    sent = [{**image_part(number), "uuid": f"{number}"} for number in range(known)]
    if sent:
        await one.render(await one.read_chat(ChatRequest([{"role": "user", "content": sent}]), ACME))
    objects.calls.clear()
    objects.most = 0
    names = [{"type": "image_url", "image_url": None, "uuid": f"{number}"} for number in range(50)]
    chat = ChatRequest([{"role": "user", "content": names}])
    if known == 50:
        assert len((await other.read_chat(chat, ACME)).items) == 50
    else:
        with pytest.raises(UnknownMedia) as error:
            await other.read_chat(chat, ACME)
        assert error.value.param == f"messages[0].content[{known}]"
    assert objects.calls == ["get"] * reads
    assert objects.most == 16
    if known == 50:
        await other.read_chat(chat, ACME)  # from memory
        assert len(objects.calls) == reads
