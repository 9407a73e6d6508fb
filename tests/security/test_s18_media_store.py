"""S18: what one tenant leaves undone in a slow media store costs that tenant, and nobody else.

Nothing stops a write that has begun. Clients that send large files and go leave such writes behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from obstore.store import MemoryStore

from semel.cache import LruCache
from semel.core import Feature, Media
from semel.fairness.limits import KeyedLimit
from semel.frontend.budget import Account, Budget
from semel.frontend.limits import BudgetLimits
from semel.frontend.service import ServedModel
from semel.render import ChatRenderer
from semel.render.file_sources import FileSources
from semel.store import objects as objects_module
from semel.store.objects import BucketObjects
from semel.store.upload import Payer, no_pin
from tests.frontend.asgi import Exchange, stream_of
from tests.frontend.rig import KEY, Rig, rig
from tests.render.drawn import FEATURE_BYTES, Drawing
from tests.security.worlds import ACME, CHAT, KEYS, UMBRA, with_part
from tests.store.stores import TIMEOUT_S, store_over
from tests.waiting import until

FILES = "/v1/files"
PNG = b"\x89PNG\r\n\x1a\n"
FILE_BYTES = 100_000
AT_ONCE = 4
"""So many such files may one tenant have under way. As shipped: four of 64 MiB."""


class SlowBucket(MemoryStore):
    """Small objects are written at once, large ones when it is woken; if it `reads_late`, it reads all of them then."""

    def __init__(self) -> None:
        self.writing, self.reading, self.reads_late = 0, 0, False
        self.woken = asyncio.Event()

    async def put_async(self, path: str, data: bytes, **options: Any) -> Any:  # type: ignore[override]
        if len(data) >= FILE_BYTES:
            self.writing += 1
            await self.woken.wait()
            self.writing -= 1
        return await super().put_async(path, data, **options)

    async def get_range_async(self, path: str, **options: Any) -> Any:
        if self.reads_late:
            self.reading += 1
            await self.woken.wait()
            self.reading -= 1
        return await super().get_range_async(path, **options)


class OneBound(BucketObjects):
    """The wrong implementation: what was given up is counted for all tenants together."""

    async def _admit(self, payer: Payer, nbytes: int = 0) -> Any:
        return await super()._admit(replace(payer, owner=""), nbytes)

    async def _run(self, operation: Coroutine[Any, Any, Any], end: Any, owner: str, nbytes: int = 0) -> Any:
        del owner
        return await super()._run(operation, end, "", nbytes)


@asynccontextmanager
async def world(
    home: Path, renderer: ChatRenderer, kind: type[BucketObjects] = BucketObjects
) -> AsyncIterator[tuple[Rig, SlowBucket]]:
    drawing = Drawing(renderer, LruCache(256 * FEATURE_BYTES))

    async def process(media: Media, options: Mapping[str, object], **_: object) -> Feature:
        return await drawing.process(Media(media.modality, media.data.removeprefix(PNG)), options)

    async with rig(home, drawing.pipeline, engine_bytes=256 * FEATURE_BYTES, keys=KEYS) as made:
        bucket = SlowBucket()
        store = await store_over(kind(bucket, TIMEOUT_S), key=KEY)
        made.service.media_store, serving = store, made.service.serving()
        pipeline = replace(serving.pipeline, process=process, files=FileSources(store))
        made.service.begin(ServedModel(serving.fleet, serving.contract, pipeline))
        yield made, bucket


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects_module, "_MAX_BYTES", AT_ONCE * FILE_BYTES)


def form(number: int, nbytes: int = FILE_BYTES) -> bytes:
    head = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nvision\r\n--b\r\n'
    file = b'Content-Disposition: form-data; name="file"; filename="x"\r\n\r\n' + bytes([number]) * nbytes
    return head + file + b"\r\n--b--\r\n"


@asynccontextmanager
async def uploading(app: Rig, bucket: SlowBucket, count: int, *, at_once: int) -> AsyncIterator[list[Exchange]]:
    """Acme sends so many large files, of which so many are being written; inside, its clients wait."""
    exchanges = [Exchange() for _ in range(count)]
    headers = {"content-type": "multipart/form-data; boundary=b", "authorization": f"Bearer {ACME}"}
    async with asyncio.TaskGroup() as sending:
        for number, exchange in enumerate(exchanges):
            sending.create_task(exchange.run(app.app, FILES, stream_of([form(number)]), headers))
        await until(lambda: bucket.writing == at_once and in_flight(app) >= count * FILE_BYTES)
        yield exchanges
        for exchange in exchanges:
            exchange.leave.set()


def in_flight(app: Rig, tenant: str = "acme") -> int:
    return app.service.budget.by_tenant().get(tenant, (0, 0))[0]


async def ask(app: Rig, key: str, method: str, path: str, **request: Any) -> httpx.Response:
    return await app.client.request(method, path, headers={"authorization": f"Bearer {key}"}, **request)


async def upload(app: Rig, key: str, data: bytes) -> httpx.Response:
    return await ask(app, key, "POST", FILES, files={"file": ("a.png", data)}, data={"purpose": "vision"})


async def statuses_of_the_other(app: Rig, file_id: str) -> dict[str, int]:
    """What umbra gets on every way to the bucket; its file is read by a chat for the first time."""
    chat = with_part({"type": "image_url", "image_url": {"file_id": file_id}})
    one, content = f"{FILES}/{file_id}", f"{FILES}/{file_id}/content"
    replies = {
        "upload": await upload(app, UMBRA, PNG + b"2"),
        "list": await ask(app, UMBRA, "GET", FILES),
        "retrieve": await ask(app, UMBRA, "GET", one),
        "content": await ask(app, UMBRA, "GET", content),
        "chat": await ask(app, UMBRA, "POST", CHAT, json=chat),
        "delete": await ask(app, UMBRA, "DELETE", one),
    }
    return {name: reply.status_code for name, reply in replies.items()}


async def test_beside_uploads_that_a_tenant_left_undone_another_is_served_S18(
    tmp_path: Path, parts_renderer: ChatRenderer
) -> None:
    async with world(tmp_path, parts_renderer) as (app, bucket):
        file_id = (await upload(app, UMBRA, PNG + b"1")).json()["id"]
        async with uploading(app, bucket, AT_ONCE + 1, at_once=AT_ONCE):
            pass  # its clients go
        assert bucket.writing == AT_ONCE
        assert set((await statuses_of_the_other(app, file_id)).values()) == {200}
        reply = await upload(app, ACME, b"1")
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "media_store_unavailable")
        message = reply.json()["error"]["message"]
        assert "earlier requests of this tenant that took too long or whose clients have gone" in message
        assert f"operations: {AT_ONCE}, bytes: {AT_ONCE * FILE_BYTES:,}" in message
        assert int(reply.headers["retry-after"]) >= 1
        assert (await ask(app, ACME, "GET", f"{FILES}/{file_id}")).status_code == 404  # which holds nothing
        bucket.woken.set()
        await until(lambda: not bucket.writing)
        assert (await upload(app, ACME, b"1")).status_code == 200


async def test_mutant_with_one_bound_for_all_the_other_is_refused(tmp_path: Path, parts_renderer: ChatRenderer) -> None:
    async with world(tmp_path, parts_renderer, OneBound) as (app, bucket):
        file_id = (await upload(app, UMBRA, PNG + b"1")).json()["id"]
        async with uploading(app, bucket, AT_ONCE + 1, at_once=AT_ONCE):
            pass
        statuses = await statuses_of_the_other(app, file_id)
        assert {statuses[name] for name in ("upload", "content", "chat")} == {503}
        bucket.woken.set()


async def bytes_on_the_account_of_what_was_left(home: Path, renderer: ChatRenderer) -> int:
    """What acme is charged while its files are still being written, and nobody waits for them."""
    async with world(home, renderer) as (app, bucket):
        async with uploading(app, bucket, AT_ONCE + 1, at_once=AT_ONCE):
            pass
        left = in_flight(app)
        bucket.woken.set()
        await until(lambda: not bucket.writing)
        await until(lambda: not app.service.budget.in_flight)
        return left


async def test_what_a_write_holds_is_on_its_tenant_s_account_until_it_has_ended_S18(
    tmp_path: Path, parts_renderer: ChatRenderer
) -> None:
    assert await bytes_on_the_account_of_what_was_left(tmp_path, parts_renderer) == AT_ONCE * FILE_BYTES


async def test_mutant_an_account_that_ends_with_its_client_charges_nobody(
    tmp_path: Path, parts_renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Account, "pin", lambda _, nbytes: no_pin(nbytes))
    assert await bytes_on_the_account_of_what_was_left(tmp_path, parts_renderer) == 0


ROUTES = ("chat", "content")


async def bytes_on_the_account_of_a_read_that_was_left(home: Path, renderer: ChatRenderer, route: str) -> int:
    """What acme is charged while its file is still being read, and nobody waits for it; the file has 9 bytes."""
    async with world(home, renderer) as (app, bucket):
        file_id, bucket.reads_late = (await upload(app, ACME, PNG + b"1")).json()["id"], True
        chat = with_part({"type": "image_url", "image_url": {"file_id": file_id}})
        asking = asyncio.create_task(
            ask(app, ACME, "POST", CHAT, json=chat)
            if route == "chat"
            else ask(app, ACME, "GET", f"{FILES}/{file_id}/content")
        )
        await until(lambda: bucket.reading == 1)
        asking.cancel()
        await asyncio.wait([asking])
        await until(lambda: not app.service.budget.requests)
        left = in_flight(app)
        bucket.woken.set()
        await until(lambda: not app.service.budget.in_flight)
        assert (await ask(app, ACME, "POST", CHAT, json=chat)).status_code == 200
        return left


@pytest.mark.parametrize("route", ROUTES)
async def test_what_a_read_holds_is_on_its_tenant_s_account_until_it_has_ended_S18(
    tmp_path: Path, parts_renderer: ChatRenderer, route: str
) -> None:
    assert await bytes_on_the_account_of_a_read_that_was_left(tmp_path, parts_renderer, route) == 9


@pytest.mark.parametrize("route", ROUTES)
async def test_mutant_a_read_that_ends_with_its_client_charges_nobody(
    tmp_path: Path, parts_renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    monkeypatch.setattr(Account, "pin", lambda _, nbytes: no_pin(nbytes))
    assert await bytes_on_the_account_of_a_read_that_was_left(tmp_path, parts_renderer, route) == 0


async def beside_a_tenant_that_has_all_bytes(home: Path, renderer: ChatRenderer, at_once: int) -> tuple[int, int]:
    """The status of umbra's upload, and how many of acme's nine were called back for it."""
    async with world(home, renderer) as (app, bucket):
        app.service.budget = Budget(BudgetLimits(max_request_bytes=2 * FILE_BYTES, max_bytes=19 * FILE_BYTES // 2))
        async with uploading(app, bucket, 9, at_once=at_once):
            reply = await upload(app, UMBRA, bytes(9 * FILE_BYTES // 10))
            bucket.woken.set()
        return reply.status_code, sum(app.service.budget.called_back.values())


async def test_uploads_that_wait_for_their_turn_are_called_back_for_another_tenant_S18(
    tmp_path: Path, parts_renderer: ChatRenderer
) -> None:
    assert await beside_a_tenant_that_has_all_bytes(tmp_path, parts_renderer, AT_ONCE) == (200, 1)


async def test_mutant_writes_that_all_begin_at_once_cannot_be_called_back(
    tmp_path: Path, parts_renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects_module, "KeyedLimit", lambda _: KeyedLimit(1 << 40))
    assert await beside_a_tenant_that_has_all_bytes(tmp_path, parts_renderer, 9) == (429, 0)
