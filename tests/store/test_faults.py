"""A media store that is slow, full or gone; frontends that are killed; folders and URLs that are none."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from obstore.store import MemoryStore

from semel.core import Digest
from semel.errors import ConfigError, MediaStoreUnavailable
from semel.store import objects as objects_module
from semel.store.index import SMALLEST_BYTES, newest, renewed
from semel.store.names import StoredFile, file_id
from semel.store.objects import BucketObjects, open_objects
from semel.store.settings import MediaStoreSettings
from semel.store.store import MediaStore, open_store
from semel.store.upload import FRONTEND, Payer, Upload
from tests.effort import examples
from tests.store.stores import (
    KEY,
    Clock,
    FaultyObjects,
    FullDisk,
    HungDisk,
    all_of,
    in_memory,
    on_disk,
    store_over,
    upload_of,
)
from tests.waiting import until


async def test_a_full_disk_is_told_as_such_in_the_log_alone_and_charges_nothing_S7(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = await store_over(BucketObjects(FullDisk(), 5.0))
    with pytest.raises(MediaStoreUnavailable, match="the disk of the media store has no space") as caught:
        await store.put("acme", upload_of(b"pixels", "secret"))
    assert "No space left on device" in caplog.text
    assert not {"device", "secret"} & {*str(caught.value).split()}
    assert store._index.nbytes == 0
    assert store._objects.errors == 1


class Forgetful(BucketObjects):
    """The wrong implementation: an operation that is given up is over."""

    async def _run(self, operation: Coroutine[Any, Any, Any], end: Any, owner: str, nbytes: int = 0) -> Any:
        try:
            return await super()._run(operation, lambda: None, owner, nbytes)
        finally:
            self._abandoned.clear()
            end()


async def writes_of_a_disk_that_does_not_answer(kind: type[BucketObjects], monkeypatch: pytest.MonkeyPatch) -> int:
    """How many of three writes it holds, of which there is room for two."""
    monkeypatch.setattr(objects_module, "_MAX_BYTES", 1_000)
    disk = HungDisk()
    objects = kind(disk, 0.05)
    for _ in range(3):
        with pytest.raises(MediaStoreUnavailable):
            await objects.put("media-1/x", bytes(400))
    writes, objects._timeout_s = disk.writes, 60.0
    disk.woken.set()
    await until(lambda: not objects._abandoned)
    await objects.put("media-1/x", bytes(400))
    assert len(objects._bytes) == 0
    assert objects.errors == writes
    return writes


async def test_a_disk_that_does_not_answer_costs_its_timeout_and_no_memory_without_bound_S18(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert await writes_of_a_disk_that_does_not_answer(BucketObjects, monkeypatch) == 2


async def test_mutant_an_operation_that_is_forgotten_when_it_is_given_up_holds_memory_without_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert await writes_of_a_disk_that_does_not_answer(Forgetful, monkeypatch) == 3


class HungList(MemoryStore):
    """A bucket that lists nothing of one folder until it is woken."""

    def __init__(self) -> None:
        self.woken = asyncio.Event()

    def list(self, prefix: str | None = None, **options: Any) -> Any:
        pages = super().list(prefix, **options)
        return self._late(pages) if prefix == "media-1/acme" else pages

    async def _late(self, pages: Any) -> AsyncIterator[Any]:
        await self.woken.wait()
        async for page in pages:
            yield page


async def listing(objects: BucketObjects, tenant: str) -> list[Any]:
    return [page async for page in objects.list(f"media-1/{tenant}", payer=Payer(tenant))]


@pytest.mark.parametrize("is_shared", [False, True])
async def test_operations_that_were_given_up_are_counted_for_their_tenant_S18(
    monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    """Those that hold no bytes too. One count for all is the control."""
    monkeypatch.setattr(objects_module, "_MAX_ABANDONED", 2)
    if is_shared:
        monkeypatch.setattr("tests.store.test_faults.Payer", lambda _: FRONTEND)
    bucket = HungList()
    objects = BucketObjects(bucket, 0.05)
    for _ in range(2):
        with pytest.raises(MediaStoreUnavailable, match="took too long; try"):
            await listing(objects, "acme")
    for tenant in ("acme", "umbra") if is_shared else ("acme",):
        with pytest.raises(MediaStoreUnavailable, match="operations: 2, bytes: 0"):
            await listing(objects, tenant)
    objects._timeout_s = 60.0
    if not is_shared:
        assert await listing(objects, "umbra") == []
    bucket.woken.set()
    await until(lambda: not objects._abandoned)
    assert await listing(objects, "acme") == []


async def test_a_folder_that_is_taken_away_is_an_error_and_back_again_is_none(tmp_path: Path) -> None:
    folder = tmp_path / "media"
    store = await store_over(on_disk(folder))
    file = await store.put("acme", upload_of(b"pixels"))
    folder.rename(tmp_path / "away")
    folder.write_bytes(b"")  # nothing can be made in a file
    with pytest.raises(MediaStoreUnavailable):
        await store.put("acme", upload_of(b"more"))
    folder.unlink()
    (tmp_path / "away").rename(folder)
    assert await store.find("acme", file.id) == file


async def test_before_the_objects_are_listed_a_call_waits_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MediaStore(in_memory(), key=KEY, capacity_bytes=1 << 30, ttl_s=100)
    putting = asyncio.create_task(store.put("acme", upload_of(b"pixels")))
    await asyncio.sleep(0)
    await store.refresh()
    assert (await putting).nbytes == len(b"pixels")
    monkeypatch.setattr("semel.store.store._FIRST_LISTING_S", 0.01)
    store = MediaStore(in_memory(), key=KEY, capacity_bytes=1 << 30, ttl_s=100)
    for call in (
        store.put("acme", upload_of(b"")),
        store.find("acme", upload_of(b"").content),  # type: ignore[arg-type]
        store.page("acme", limit=1),
    ):
        with pytest.raises(MediaStoreUnavailable, match="is being read"):
            await call


async def test_a_store_that_is_gone_at_the_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semel.store.store._FIRST_RETRY_S", 0.01)
    faulty = FaultyObjects(in_memory())
    faulty.fault = "gone"
    store = MediaStore(faulty, key=KEY, capacity_bytes=1 << 30, ttl_s=100)
    running = asyncio.create_task(store.run())
    try:
        await until(lambda: faulty.calls.count("list") >= 3)
        faulty.fault = ""
        await until(store._listed.is_set)
    finally:
        running.cancel()
    await store.put("acme", upload_of(b"pixels"))


class HalfNamed(MediaStore):
    """The wrong implementation: the old object is deleted before the new one is there."""

    async def put(self, tenant: str, upload: Any, *pin: Any) -> Any:
        others = await self.page(tenant, limit=100)
        assert others is not None
        await self._try_to_delete(others.files, FRONTEND)
        return await super().put(tenant, upload, *pin)


async def found_after_its_old_object_stayed() -> bool:
    """Whether a file that had expired is there after it was uploaded again, and its old object could not be deleted."""
    faulty, clock = FaultyObjects(in_memory()), Clock()
    store = await store_over(faulty, clock, ttl_s=100)
    for _ in range(2):
        file = await store.put("acme", upload_of(b"pixels"))
    clock.now_s += 100
    assert await store.find("acme", file.id) is None
    faulty.breaks_after = 2  # the objects are listed, and the new one is written
    await store.put("acme", upload_of(b"pixels"))
    faulty.breaks_after = None
    return await store.find("acme", file.id) is not None


async def test_a_file_that_has_expired_is_there_when_it_is_uploaded_again() -> None:
    assert await found_after_its_old_object_stayed()


async def test_mutant_a_first_revision_beside_an_expired_second_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def mutant(file: StoredFile, others: list[StoredFile], now_s: float) -> StoredFile:
        return file if newest(others, now_s) is None else renewed(file, others, now_s)

    monkeypatch.setattr("semel.store.store.renewed", mutant)
    assert not await found_after_its_old_object_stayed()


async def test_what_has_expired_takes_no_room_of_what_has_not() -> None:
    """Neither until it is deleted, nor where it could not be, when a frontend starts again."""
    faulty, clock = FaultyObjects(in_memory()), Clock()
    store = await store_over(faulty, clock, capacity_bytes=4 * SMALLEST_BYTES)
    for one in range(3):
        await store.put("acme", upload_of(bytes([one]), ttl_s=50))
    kept = [await store.put("acme", upload_of(bytes([one]))) for one in (7,)]
    clock.now_s += 50
    faulty.fault = "gone"
    await store.expire()
    faulty.fault = ""
    kept += [await store.put("acme", upload_of(bytes([one]))) for one in (8, 9)]
    assert sorted(file.id for file in await all_of(store)) == sorted(file.id for file in kept)
    again = await store_over(faulty, clock, capacity_bytes=4 * SMALLEST_BYTES)
    assert sorted(file.id for file in await all_of(again)) == sorted(file.id for file in kept)
    assert len([path async for page in faulty.list("media-1") for path in page]) == 3


TENANTS, CONTENTS = ("acme", "umbra"), range(5)
STEPS = ("put", "delete", "restart", "kill", "gone", "full", "back", "later", "read")


def drawn(tenant: str, one: int) -> tuple[Digest, Upload]:
    upload = upload_of(bytes([one]) * 5, f"{one}.png")
    return file_id(upload.content, tenant, KEY), upload


class Life:
    """A store of two tenants through faults, kills and restarts, against a dictionary."""

    def __init__(self) -> None:
        self.objects, self.clock = FaultyObjects(in_memory()), Clock()
        self.must: dict[tuple[str, int], float] = {}
        """When each file expires that has to be there."""
        self.may: set[tuple[str, int]] = set()
        """What may be there or not, because its upload or its deletion was cut off."""

    async def restart(self) -> None:
        self.objects.fault, self.objects.killed_after = "", None
        self.store = await store_over(self.objects, self.clock, ttl_s=100)

    def has(self, tenant: str, one: int) -> bool:
        return self.must.get((tenant, one), 0.0) > self.clock.now_s

    async def step(self, step: str, tenant: str, one: int) -> None:
        match step:
            case "gone" | "full" | "back":
                self.objects.fault = step
            case "later":
                self.clock.now_s += 40
            case "kill":
                self.objects.killed_after = one
            case "restart":
                await self.restart()
            case _:
                await self.use(step, tenant, one)

    async def use(self, step: str, tenant: str, one: int) -> None:
        digest, upload = drawn(tenant, one)
        try:
            if step == "put":
                await self.store.put(tenant, upload)
                self.must[tenant, one] = self.clock.now_s + 100
                self.may.discard((tenant, one))
                return
            found = await self.store.read(tenant, digest, lambda _: None)
            assert found is None or bytes(found[1]) == upload.data
            assert (tenant, one) in self.may or (found is not None) == self.has(tenant, one)
            if step == "delete":
                await self.store.delete(tenant, digest)
                self.must.pop((tenant, one), None)
                self.may.discard((tenant, one))
        except (MediaStoreUnavailable, asyncio.CancelledError):
            if step == "delete" or (step == "put" and not self.has(tenant, one)):
                self.must.pop((tenant, one), None)
                self.may.add((tenant, one))

    async def check(self) -> None:
        await self.restart()
        for tenant in TENANTS:
            listed = {file.id for file in await all_of(self.store, tenant)}
            for one in CONTENTS:
                if (tenant, one) not in self.may:
                    assert (drawn(tenant, one)[0] in listed) == self.has(tenant, one)


@settings(max_examples=examples(300), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.sampled_from(TENANTS), st.sampled_from(CONTENTS)), max_size=40))
async def test_in_any_sequence_a_file_is_what_was_uploaded_or_none(steps: list[tuple[str, str, int]]) -> None:
    life = Life()
    await life.restart()
    for step in steps:
        await life.step(*step)
    await life.check()


async def test_mutant_a_store_that_deletes_before_it_writes_is_found_by_such_a_sequence() -> None:
    life = Life()
    await life.restart()
    life.store.__class__ = HalfNamed
    await life.step("put", "acme", 0)
    await life.step("full", "acme", 0)
    await life.step("put", "acme", 0)
    with pytest.raises(AssertionError):
        await life.check()


def test_what_a_killed_process_was_writing_is_removed_an_hour_later(tmp_path: Path) -> None:
    owner = tmp_path / "media-1" / "owner"
    owner.mkdir(parents=True)
    old, new, whole = owner / "1.png#1", owner / "2.png#2", owner / "3.png"
    for path in (old, new, whole):
        path.write_bytes(b"half")
        if path != new:
            os.utime(path, (0, 0))
    open_objects(str(tmp_path), 1.0)
    assert not old.exists()
    assert new.exists()
    assert whole.exists()


@pytest.mark.parametrize("location", ["http://host/bucket", "ftp://host/x", "file:///tmp/x"])
def test_what_is_neither_a_folder_nor_a_bucket_is_refused_with_its_flag(location: str) -> None:
    with pytest.raises(ConfigError, match="--media-store"):
        open_objects(location, 1.0)


def test_a_folder_that_cannot_be_made_is_refused_with_its_flag(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"--media-store .*Not a directory"):
        open_objects(str(tmp_path / "file" / "media"), 1.0)


def test_a_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    assert open_store(MediaStoreSettings(location=str(tmp_path / "a" / "media")), KEY) is not None
    assert (tmp_path / "a" / "media").stat().st_mode & 0o777 == 0o700
    assert open_store(MediaStoreSettings(), KEY) is None
