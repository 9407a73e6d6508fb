"""The routes of files: OpenAI's shapes with the real `openai` client, tenants, limits, and a store that fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from semel.core import Keyring
from semel.frontend.api.openai import files as shapes
from semel.frontend.budget import Budget
from semel.frontend.limits import BodyLimits, BudgetLimits
from semel.store.objects import OnEnd
from semel.store.store import MediaStore
from semel.store.upload import Payer
from tests.frontend.asgi import Exchange, stream_of
from tests.frontend.rig import KEY, Rig, rig
from tests.render.drawn import Drawing
from tests.store.stores import Clock, FaultyObjects, in_memory, store_over

ACME, UMBRA = "acme-0123456789abcdef", "umbra-0123456789abcdef"
FILES = "/v1/files"
UNKNOWN = f"file-{'0' * 64}"
FORM = {"content-type": "multipart/form-data; boundary=b"}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def objects() -> FaultyObjects:
    return FaultyObjects(in_memory())


@pytest.fixture
async def served(tmp_path: Path, drawing: Drawing, objects: FaultyObjects, clock: Clock) -> AsyncIterator[Rig]:
    keys = Keyring([("acme", ACME), ("umbra", UMBRA)])
    async with rig(tmp_path, drawing.pipeline, keys=keys) as made:
        made.service.media_store = store = await store_over(objects, clock, key=KEY)
        made.meter.watch(store.samples)
        made.client.headers["authorization"] = f"Bearer {ACME}"
        yield made


def client_of(served: Rig, key: str = ACME) -> openai.AsyncOpenAI:
    transport: Any = served.client
    return openai.AsyncOpenAI(api_key=key, base_url="http://frontend/v1", http_client=transport, max_retries=0)


async def send(served: Rig, data: bytes = b"pixels", name: str = "a.png", **fields: str) -> httpx.Response:
    return await served.client.post(FILES, files={"file": (name, data)}, data={"purpose": "vision", **fields})


async def test_the_openai_package_uploads_lists_reads_and_deletes(served: Rig, clock: Clock) -> None:
    client = client_of(served)
    made = await client.files.create(
        file=("screen 1.png", b"pixels"),
        purpose="vision",
        expires_after={"anchor": "created_at", "seconds": 3_600},
    )
    assert (made.bytes, made.filename, made.purpose, made.object) == (6, "screen 1.png", "vision", "file")
    assert (made.created_at, made.expires_at) == (clock.now_s, clock.now_s + 3_600)
    assert await client.files.retrieve(made.id) == made
    assert (await client.files.content(made.id)).content == b"pixels"
    assert [one async for one in client.files.list()] == [made]
    gone = await client.files.delete(made.id)
    assert (gone.id, gone.deleted) == (made.id, True)
    with pytest.raises(openai.NotFoundError) as caught:
        await client.files.retrieve(made.id)
    assert caught.value.code == "unknown_media"
    assert [one async for one in client.files.list()] == []


async def test_files_are_listed_page_by_page_as_the_openai_package_asks(
    served: Rig, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, made = client_of(served), []
    for number in range(7):
        clock.now_s += 1
        purpose: Any = ("vision", "user_data")[number % 2]
        made.append(await client.files.create(file=(f"{number}.png", bytes([number])), purpose=purpose))
    assert [one async for one in client.files.list(limit=2)] == made[::-1]
    assert [one async for one in client.files.list(limit=3, order="asc")] == made
    assert [one async for one in client.files.list(purpose="user_data", order="asc")] == made[1::2]
    assert (await client.files.list(after=made[2].id)).data == [made[1], made[0]]
    monkeypatch.setattr("semel.frontend.routes.files.MAX_PAGE", 2)
    page = await client.files.list()
    assert (page.data, page.has_more) == ([made[6], made[5]], True)
    assert [one async for one in client.files.list()] == made[::-1]


WRONG_FORMS: dict[str, tuple[dict[str, str], dict[str, Any], str]] = {
    "no purpose": ({"purpose": ""}, {}, "purpose"),
    "another purpose": ({"purpose": "fun"}, {}, "purpose"),
    "a wrong anchor": ({"expires_after[anchor]": "now", "expires_after[seconds]": "3600"}, {}, "expires_after.anchor"),
    "too short": (
        {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3599"},
        {},
        "expires_after.seconds",
    ),
    "too long": (
        {"expires_after[anchor]": "created_at", "expires_after[seconds]": "2592001"},
        {},
        "expires_after.seconds",
    ),
    "half an expiry": ({"expires_after[seconds]": "3600"}, {}, "expires_after.anchor"),
    "another field": ({"public": "1"}, {}, "public"),
    "no file": ({}, {"files": {"photo": b"x"}}, "file"),
    "an empty file": ({}, {"files": {"file": ("a.png", b"")}}, "file"),
    "two files": ({}, {"files": {"file": b"x", "mask": b"y"}}, "file"),
}


@pytest.mark.parametrize("case", WRONG_FORMS)
async def test_a_form_that_is_wrong_is_refused_with_its_field(served: Rig, case: str) -> None:
    fields, request, param = WRONG_FORMS[case]
    files = request.get("files", {"file": ("a.png", b"x")})
    reply = await served.client.post(FILES, files=files, data={"purpose": "vision", **fields})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


@pytest.mark.parametrize("query", ["limit=0", "limit=10001", "limit=x", "order=up", "purpose=fun"])
async def test_a_list_that_cannot_be_is_refused_with_its_parameter(served: Rig, query: str) -> None:
    reply = await served.client.get(f"{FILES}?{query}")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, query.partition("=")[0])


ROUTES = {
    "retrieve": ("GET", "/v1/files/{id}"),
    "content": ("GET", "/v1/files/{id}/content"),
    "delete": ("DELETE", "/v1/files/{id}"),
    "after": ("GET", "/v1/files?after={id}"),
}


@pytest.mark.parametrize("route", ROUTES)
async def test_a_foreign_file_is_answered_as_an_unknown_one_byte_for_byte_and_after_the_same_work_S12(
    served: Rig, objects: FaultyObjects, route: str
) -> None:
    method, path = ROUTES[route]
    file_id, umbra = (await send(served)).json()["id"], {"authorization": f"Bearer {UMBRA}"}
    seen = []
    for one in (file_id, UNKNOWN):
        objects.calls.clear()
        reply = await served.client.request(method, path.format(id=one), headers=umbra)
        headers = {name: value for name, value in reply.headers.items() if name != "x-request-id"}
        seen.append((reply.status_code, reply.content.replace(one.encode(), b"ID"), headers, list(objects.calls)))
    assert seen[0] == seen[1]
    assert seen[0][0] == 404
    mine = await served.client.request(method, path.format(id=file_id))  # still there
    assert mine.status_code == 200


async def test_mutant_a_store_that_knows_no_tenants_tells_foreign_files(
    served: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semel.store.store.owner_name", lambda _, key: f"{key.id}-{'0' * 32}")
    file_id = (await send(served)).json()["id"]
    reply = await served.client.get(f"{FILES}/{file_id}", headers={"authorization": f"Bearer {UMBRA}"})
    assert reply.status_code == 200


@pytest.mark.parametrize("file_id", ["x", "file-", f"file-{'A' * 64}", f"file-{'0' * 65}", "file-%00", "é" * 300])
async def test_what_is_no_id_is_an_unknown_file(served: Rig, file_id: str) -> None:
    for method, path in ROUTES.values():
        reply = await served.client.request(method, path.format(id=file_id))
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "unknown_media")
        assert len(reply.json()["error"]["message"]) < 700


async def test_without_a_store_every_route_names_the_flag_and_reads_nothing(served: Rig) -> None:
    served.service.media_store = None
    for method, path in (*ROUTES.values(), ("POST", FILES), ("GET", FILES)):
        reply = await served.client.request(method, path.format(id=UNKNOWN))
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "no_media_store")
        assert "--media-store" in reply.json()["error"]["message"]


@pytest.mark.parametrize("fault", ["gone", "full"])
async def test_a_store_that_fails_costs_a_503_that_names_it_and_nothing_elsewhere(
    served: Rig, objects: FaultyObjects, fault: str
) -> None:
    file_id = (await send(served)).json()["id"]
    objects.fault = fault
    reply = await send(served, b"more")
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "media_store_unavailable")
    assert "media store" in reply.json()["error"]["message"]
    assert int(reply.headers["retry-after"]) >= 1
    statuses = [
        (await served.client.request(method, path.format(id=file_id))).status_code
        for method, path in (ROUTES["retrieve"], ROUTES["content"])
    ]
    assert statuses == ([503, 503] if fault == "gone" else [200, 200])
    await served.ok("/v1/completions", {"prompt": "hello"})
    assert (await served.client.get("/ready")).status_code == 200
    objects.fault = ""
    assert (await send(served, b"more")).status_code == 200
    assert served.service.budget.in_flight == 0


async def test_a_store_that_hangs_costs_its_timeout_and_others_nothing(
    served: Rig, objects: FaultyObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def hang(*_: object, **__: object) -> None:
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(objects, "put", hang)
    uploading = asyncio.create_task(send(served))
    await asyncio.wait_for(begun.wait(), 30)
    await served.ok("/v1/completions", {"prompt": "hello"})
    uploading.cancel()
    await asyncio.wait([uploading])
    assert served.service.budget.in_flight == 0


def endless(pulled: list[int]) -> Iterator[bytes]:
    yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
    while True:
        pulled.append(65_536)
        yield bytes(65_536)


async def test_a_file_is_refused_as_soon_as_it_is_over_its_limit_S4(served: Rig) -> None:
    served.service.max_file_bytes = 1_000_000
    exchange, pulled = Exchange(), list[int]()
    headers = {**FORM, "authorization": f"Bearer {ACME}"}
    await exchange.run(served.app, FILES, stream_of(endless(pulled)), headers)
    assert (exchange.status, exchange.code) == (413, "media_too_large")
    assert "--max-media-bytes" in exchange.message
    assert sum(pulled) <= 1_000_000 + 2 * 65_536
    assert served.service.budget.in_flight == 0


async def test_an_upload_is_within_the_limits_of_bodies_and_of_its_tenant_s_account_S18(served: Rig) -> None:
    served.service.body = replace(BodyLimits(), max_bytes=100_000)
    reply = await send(served, bytes(200_000))
    assert "--max-body-bytes" in reply.json()["error"]["message"]
    served.service.body = BodyLimits()
    served.service.budget = Budget(replace(BudgetLimits(), max_request_bytes=100_000, max_bytes=200_000))
    reply = await send(served, bytes(150_000))
    assert (reply.status_code, "--max-request-media-bytes" in reply.json()["error"]["message"]) == (413, True)
    file_id = (await send(served, bytes(90_000))).json()["id"]
    assert (await served.client.get(f"{FILES}/{file_id}/content")).content == bytes(90_000)
    served.service.budget = Budget(replace(BudgetLimits(), max_request_bytes=80_000, max_bytes=200_000))
    assert (await served.client.get(f"{FILES}/{file_id}/content")).status_code == 413
    assert served.service.budget.in_flight == 0


async def test_every_byte_of_an_upload_is_charged_while_it_is_stored_S18(
    served: Rig, objects: FaultyObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    charged = []
    put = objects.put

    async def spy(path: str, data: bytes | bytearray, on_end: OnEnd, *, payer: Payer) -> None:
        charged.append((served.service.budget.in_flight, len(data)))
        await put(path, data, on_end, payer=payer)

    monkeypatch.setattr(objects, "put", spy)
    await send(served, bytes(500_000))
    assert all(in_flight >= size for in_flight, size in charged)
    assert len(charged) == 1
    assert served.service.budget.in_flight == 0


async def test_what_the_store_does_is_counted(served: Rig, clock: Clock) -> None:
    file_id = (await send(served)).json()["id"]
    await served.client.get(f"{FILES}/{file_id}")
    await served.client.get(f"{FILES}/{UNKNOWN}")
    clock.now_s += 20_000
    store = served.service.media_store
    assert isinstance(store, MediaStore)
    await store.expire()
    assert served.metrics("semel_media_store") == {
        "semel_media_store_files": "0.0",
        "semel_media_store_bytes": "0.0",
        "semel_media_store_capacity_bytes": "6.7108864e+07",
        "semel_media_store_queries_total": "2.0",
        "semel_media_store_hits_total": "1.0",
        "semel_media_store_evictions_total": "0.0",
        "semel_media_store_expirations_total": "1.0",
        "semel_media_store_errors_total": "0.0",
    }


async def test_a_download_is_never_something_that_a_browser_runs(served: Rig) -> None:
    file_id = (await send(served, b"<script>alert(1)</script>", "a.html")).json()["id"]
    reply = await served.client.get(f"{FILES}/{file_id}/content")
    assert reply.headers["content-type"] == "application/octet-stream"
    assert reply.headers["x-content-type-options"] == "nosniff"


def test_the_shape_of_a_file_is_openai_s() -> None:
    told = shapes.FileObject.__annotations__.keys()
    theirs = openai.types.FileObject.model_fields
    assert {name for name, field in theirs.items() if field.is_required()} <= told <= theirs.keys()
