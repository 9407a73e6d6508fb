"""A process that is killed, with kill -9, between the two objects of a file: what it leaves is never half named.

The process says where it is and waits there, so that it is killed at that very place, in a folder and in a bucket.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from semel.store.index import SMALLEST_BYTES
from semel.store.objects import open_objects
from tests.store.s3 import BUCKET, S3_VARIABLES, s3_server
from tests.store.stores import TIMEOUT_S, all_of, store_over

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

CHILD = """
import asyncio, sys
from semel.store.index import SMALLEST_BYTES
from semel.store.objects import open_objects
from semel.store.upload import FRONTEND
from semel.store.store import MediaStore
from tests.store.stores import FaultyObjects, store_over, upload_of

place, kind, location = sys.argv[1:]

class Waiting(FaultyObjects):
    async def wait(self, call, at):
        if self.is_armed and place == f"{at} {call}":
            print("here", flush=True)
            await asyncio.sleep(600)
    async def put(self, path, data, on_end, *, payer):
        await self.wait("put", "before")
        await super().put(path, data, on_end, payer=payer)
        await self.wait("put", "after")
    async def delete(self, paths, *, payer):
        for path in paths:
            await self.wait("delete", "before")
            await super().delete([path], payer=payer)
            await self.wait("delete", "after")

class DeletesFirst(MediaStore):
    async def put(self, tenant, upload, *pin):
        page = await self.page(tenant, limit=100)
        await self._try_to_delete([file for file in page.files if file.name == "kept.png"], FRONTEND)
        return await super().put(tenant, upload, *pin)

async def main():
    objects = Waiting(open_objects(location, 30.0))
    objects.is_armed = False
    store = await store_over(objects, capacity_bytes=4 * SMALLEST_BYTES)
    for one in range(3):
        await store.put("acme", upload_of(bytes([one]), "kept.png"))
    objects.is_armed = True
    if kind == "mutant":
        store.__class__ = DeletesFirst
    await store.put("acme", upload_of(bytes([0]), "renamed.png"))

asyncio.run(main())
"""
PLACES = ("before put", "after put", "before delete", "after delete")


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_server(tmp_path_factory.mktemp("s3")) as endpoint:
        yield endpoint


@pytest.fixture(params=["disk", "s3"])
def location(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "disk":
        return str(tmp_path / "media")
    for name, value in {**S3_VARIABLES, "AWS_ENDPOINT_URL": request.getfixturevalue("s3")}.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{tmp_path.name}"


def kill_at(place: str, kind: str, location: str, environment: Mapping[str, str]) -> None:
    """A process with three files renews one, and is killed where it says that it is."""
    command = [sys.executable, "-c", CHILD, place, kind, location]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=dict(environment))
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"here\n"
    finally:
        process.kill()
        process.wait(timeout=60)
        process.stdout.close()


async def names_after(place: str, location: str, kind: str = "") -> list[str]:
    """The names of the files that a frontend finds after that. Each is whole, and has one object."""
    await asyncio.to_thread(kill_at, place, kind, location, os.environ)
    objects = open_objects(location, TIMEOUT_S)
    store = await store_over(objects, capacity_bytes=4 * SMALLEST_BYTES)
    files = await all_of(store)
    for file in files:
        found = await store.read("acme", file.id, lambda _: None)
        assert found is not None
        assert found[0] == file
    assert len({file.id for file in files}) == len(files)
    paths = [path for page in [page async for page in objects.list("media-1")] for path, _ in page]
    assert len([path for path in paths if "#" not in path]) == len(files)
    return sorted(file.name for file in files)


@pytest.mark.parametrize("place", PLACES)
async def test_a_file_is_there_under_one_name_wherever_its_process_is_killed(location: str, place: str) -> None:
    renamed = "kept.png" if place == "before put" else "renamed.png"
    assert await names_after(place, location) == sorted(["kept.png", "kept.png", renamed])


async def test_mutant_that_deletes_first_loses_files(tmp_path: Path) -> None:
    assert await names_after("before put", str(tmp_path / "media"), "mutant") == []
