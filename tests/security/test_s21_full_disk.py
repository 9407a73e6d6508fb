"""S21: over a socket, a tenant that fills the disk of the media store costs another neither its uploads nor its files.

The disk has 8 MiB, real where one can be mounted, and the store may have 64.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from semel.lab.bench.ports import free_port
from semel.store import store as store_module
from semel.web.server import HttpServer
from tests.frontend.rig import KEY, Rig, rig
from tests.render.drawn import Drawing
from tests.security.worlds import ACME, KEYS, UMBRA
from tests.store.disks import DISK_BYTES, small_disk
from tests.store.stores import store_over
from tests.waiting import until

FILE_BYTES = 1_000_000
FIT = DISK_BYTES // FILE_BYTES


@asynccontextmanager
async def served(home: Path, drawing: Drawing) -> AsyncIterator[tuple[Rig, str]]:
    """A frontend at a port, and its address."""
    with small_disk(home / "disk") as objects:
        async with rig(home, drawing.pipeline, keys=KEYS) as made:
            made.service.media_store = store = await store_over(objects, key=KEY)
            made.meter.watch(store.samples)
            port = free_port()
            server = HttpServer(made.app, "127.0.0.1", port)
            async with server.running():
                await until(lambda: server._server.started)
                yield made, f"http://127.0.0.1:{port}/v1/files"


async def upload(url: str, key: str, numbers: range) -> list[httpx.Response]:
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=60) as client:
        files = [{"file": ("a.png", bytes([number]) * FILE_BYTES)} for number in numbers]
        return [await client.post(url, files=file, data={"purpose": "vision"}) for file in files]


async def test_a_tenant_within_its_share_loses_neither_uploads_nor_files_to_a_full_disk_S21(
    tmp_path: Path, drawing: Drawing
) -> None:
    async with served(tmp_path, drawing) as (made, url):
        assert {reply.status_code for reply in await upload(url, ACME, range(FIT + 2))} == {200}
        umbras = await upload(url, UMBRA, range(3))
        assert [reply.status_code for reply in umbras] == [200] * 3
        assert {reply.status_code for reply in await upload(url, ACME, range(100, 110))} == {200}
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {UMBRA}"}) as client:
            for number, reply in enumerate(umbras):
                content = await client.get(f"{url}/{reply.json()['id']}/content")
                assert content.content == bytes([number]) * FILE_BYTES
        (capacity,) = made.metrics("semel_media_store_capacity_bytes").values()
        assert 6 * FILE_BYTES <= float(capacity) <= DISK_BYTES


async def test_mutant_without_eviction_for_the_disk_the_other_tenant_gets_503_S21(
    tmp_path: Path, drawing: Drawing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_DISK_RETRIES", 0)
    async with served(tmp_path, drawing) as (_, url):
        await upload(url, ACME, range(FIT + 2))
        (reply,) = await upload(url, UMBRA, range(1))
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "media_store_unavailable")
        assert "the disk of the media store has no space for the 1,000,000 bytes" in reply.json()["error"]["message"]
        assert int(reply.headers["retry-after"]) >= 1
