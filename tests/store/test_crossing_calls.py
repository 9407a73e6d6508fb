"""Calls of the media store that cross each other: a client goes, files expire, a file is uploaded again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from semel.errors import MediaStoreUnavailable
from semel.store import objects as objects_module
from semel.store.index import SMALLEST_BYTES
from semel.store.names import StoredFile
from semel.store.objects import BucketObjects
from semel.store.store import MediaStore
from semel.store.upload import FRONTEND, Payer, Pin, Upload, no_pin
from tests.store.stores import KEY, Clock, FaultyObjects, HungDisk, all_of, in_memory, store_over, upload_of
from tests.waiting import until


async def charges_of_a_write_that_its_client_left() -> tuple[int, int, int]:
    """What is charged once its client has gone, once it has ended, and how many files are then listed."""
    disk = HungDisk()
    store = await store_over(BucketObjects(disk, 60.0))
    sending = asyncio.create_task(store.put("acme", upload_of(b"pixels")))
    await disk.begun.wait()
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    left = store._index.nbytes
    disk.woken.set()
    await until(lambda: not store._objects._abandoned)
    return left, store._index.nbytes, len(await all_of(store))


async def test_an_upload_whose_client_has_gone_is_charged_and_listed_as_what_it_becomes() -> None:
    assert await charges_of_a_write_that_its_client_left() == (SMALLEST_BYTES, SMALLEST_BYTES, 1)


async def test_mutant_a_charge_that_ends_with_its_client_leaves_an_object_that_nobody_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put = BucketObjects.put

    async def mutant(self: BucketObjects, path: str, data: bytes, on_end: Any, **_: Any) -> None:
        try:
            await put(self, path, data)
        except BaseException:
            on_end(False)
            raise

    monkeypatch.setattr(BucketObjects, "put", mutant)
    assert await charges_of_a_write_that_its_client_left() == (0, 0, 0)


@pytest.mark.parametrize("ends_by", ["refusal", "timeout", "cancellation"])
async def test_a_write_that_is_never_begun_is_charged_to_nobody(monkeypatch: pytest.MonkeyPatch, ends_by: str) -> None:
    monkeypatch.setattr(objects_module, "_MAX_BYTES", 8)
    disk = HungDisk()
    objects = BucketObjects(disk, 60.0)
    store = await store_over(objects)
    first = asyncio.create_task(store.put("acme", upload_of(b"pixels")))
    await disk.begun.wait()
    if ends_by == "refusal":
        first.cancel()
        await asyncio.wait([first])
        with pytest.raises(MediaStoreUnavailable, match="operations: 1, bytes: 6"):
            await store.put("acme", upload_of(b"more"))
    elif ends_by == "timeout":
        objects._timeout_s = 0.05
        with pytest.raises(MediaStoreUnavailable, match=r"other files of this tenant \(1 operations, 6 bytes\)"):
            await store.put("acme", upload_of(b"more"))
    else:
        second = asyncio.create_task(store.put("acme", upload_of(b"more")))
        await until(lambda: store._index.nbytes == 2 * SMALLEST_BYTES)
        second.cancel()
        await asyncio.wait([second])
    assert store._index.nbytes == SMALLEST_BYTES
    disk.woken.set()
    await asyncio.wait([first])
    await until(lambda: not objects._abandoned and not len(objects._bytes))
    assert store._index.nbytes == SMALLEST_BYTES


async def test_a_file_that_is_larger_than_all_that_may_be_held_at_once_is_stored_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(objects_module, "_MAX_BYTES", 1)
    store = await store_over(in_memory())
    files = await asyncio.gather(*(store.put("acme", upload_of(data)) for data in (b"pixels", b"more")))
    assert {file.nbytes for file in files} == {6, 4}


async def calls_before_a_write(kind: type[MediaStore]) -> list[str]:
    """What is asked of the objects by an upload while another tenant's files have expired, up to its own write."""
    faulty, clock = FaultyObjects(in_memory()), Clock()
    store = kind(faulty, key=KEY, capacity_bytes=8 * SMALLEST_BYTES, ttl_s=100, clock=clock)
    await store.refresh()
    for one in range(8):
        await store.put("umbra", upload_of(bytes([one])))
    clock.now_s += 100
    faulty.calls.clear()
    await store.put("acme", upload_of(b"pixels"))
    before = faulty.calls[: faulty.calls.index("put")]
    await store.expire()
    assert len([path async for page in faulty.list("media-1") for path in page]) == 1
    return before


class ExpiresFirst(MediaStore):
    """The wrong implementation: an upload waits until all that has expired is deleted."""

    async def put(self, tenant: str, upload: Upload, pin: Pin = no_pin) -> StoredFile:
        await self.expire()
        return await super().put(tenant, upload, pin)


async def test_an_upload_has_the_room_of_what_has_expired_without_waiting_for_its_deletion() -> None:
    assert await calls_before_a_write(MediaStore) == ["list"]


async def test_mutant_an_upload_that_deletes_what_has_expired_waits_for_every_file_of_others() -> None:
    assert (await calls_before_a_write(ExpiresFirst)).count("delete") == 8


class Renewing(FaultyObjects):
    """The file is uploaded again whenever it has been looked up and is about to be read."""

    store: MediaStore
    renewals = 1

    async def get(self, path: str, nbytes: int, *, start: int = 0, payer: Payer = FRONTEND) -> memoryview | None:
        if self.renewals:
            self.renewals -= 1
            await self.store.put("acme", upload_of(b"pixels", f"{self.renewals}.png"))
        return await super().get(path, nbytes, start=start, payer=payer)


@pytest.mark.parametrize("renewals", [1, 2])
async def test_a_file_that_is_uploaded_again_while_it_is_read_is_read(renewals: int) -> None:
    objects, spent = Renewing(in_memory()), list[int]()
    objects.store = store = await store_over(objects)
    objects.renewals = renewals
    file = await store.put("acme", upload_of(b"pixels"))
    found = await store.read("acme", file.id, spent.append)
    assert found is not None
    assert bytes(found[1]) == b"pixels"
    assert spent == [6]


async def test_a_file_that_is_deleted_while_it_is_read_is_none() -> None:
    objects = FaultyObjects(in_memory())
    store = await store_over(objects)
    file = await store.put("acme", upload_of(b"pixels"))

    async def deleted(*_: object, **__: object) -> None:
        await store.delete("acme", file.id)

    objects.get = deleted  # type: ignore[method-assign]
    assert await store.read("acme", file.id, lambda _: None) is None
