"""A disk that is smaller than the media store may be, real where one can be mounted (`disks`), and two tenants."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from semel.aio import at_once
from semel.core import Digest
from semel.errors import MediaStoreUnavailable, MediaTooLarge
from semel.fairness.tenant_lru import TenantLru
from semel.store import store as store_module
from semel.store.index import SMALLEST_BYTES, FileIndex, NoRoom
from semel.store.names import StoredFile
from semel.store.objects import BucketObjects, open_objects
from semel.store.store import MediaStore
from tests.store.disks import DISK_BYTES, SmallDisk, mounted_disk
from tests.store.stores import TIMEOUT_S, all_of, store_over, upload_of

FILE_BYTES = 1_000_000
FIT = DISK_BYTES // FILE_BYTES
CONFIGURED = 64 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted_disk(tmp_path / "disk") as fault:
        if fault:
            pytest.skip(f"nothing can be mounted here: {fault}")
        yield tmp_path / "disk"


@pytest.fixture(params=["a real one", "a fake one"])
def objects(request: pytest.FixtureRequest) -> BucketObjects:
    if request.param == "a fake one":
        return BucketObjects(SmallDisk(), TIMEOUT_S)
    return open_objects(str(request.getfixturevalue("disk") / "media"), TIMEOUT_S)


def data(number: int, nbytes: int = FILE_BYTES) -> bytes:
    return bytes([number]) * nbytes


async def put(store: MediaStore, tenant: str, numbers: Iterable[int]) -> list[StoredFile]:
    return [await store.put(tenant, upload_of(data(number))) for number in numbers]


async def kept(store: MediaStore, tenant: str, files: list[StoredFile]) -> list[int]:
    """Which files can be read, by their places; what is read is what was stored."""
    found = [await store.read(tenant, file.id, lambda _: None) for file in files]
    return [place for place, one in enumerate(found) if one is not None and one[0] == files[place]]


def sample(store: MediaStore, name: str) -> float:
    return next(value for metric, value, _ in store.samples() if metric.name == f"semel_media_store_{name}")


async def test_a_tenant_alone_loses_its_oldest_files_and_no_upload_fails(objects: BucketObjects) -> None:
    store = await store_over(objects, capacity_bytes=CONFIGURED)
    assert sample(store, "capacity_bytes") == CONFIGURED
    files = await put(store, "acme", range(3 * FIT))
    left = await kept(store, "acme", files)
    assert left == list(range(3 * FIT - len(left), 3 * FIT))
    assert len(left) >= FIT - 1
    assert len(left) * FILE_BYTES <= sample(store, "capacity_bytes") <= DISK_BYTES
    assert sample(store, "evictions_total") == 3 * FIT - len(left)
    assert 1 <= sample(store, "errors_total") <= 2, "from then on files go before the disk is full"
    again = await store_over(objects, capacity_bytes=CONFIGURED)
    assert {file.id for file in await all_of(again)} == {files[place].id for place in left}


async def flooded(store: MediaStore) -> tuple[list[int], list[int]]:
    """Umbra stores three files after acme has filled the disk, and acme ten more. Which ones each has then."""
    acmes = await put(store, "acme", range(FIT))
    umbras = await put(store, "umbra", range(3))
    acmes += await put(store, "acme", range(100, 110))
    return await kept(store, "umbra", umbras), await kept(store, "acme", acmes)


async def test_the_tenant_within_its_share_gets_its_files_in_and_loses_none_to_the_other_S21(
    objects: BucketObjects,
) -> None:
    umbras, acmes = await flooded(await store_over(objects, capacity_bytes=CONFIGURED))
    assert umbras == [0, 1, 2]
    assert acmes == list(range(FIT + 10 - len(acmes), FIT + 10))
    assert len(acmes) >= FIT - 4


async def test_mutant_without_eviction_for_the_disk_the_other_tenant_is_refused(
    objects: BucketObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_DISK_RETRIES", 0)
    with pytest.raises(MediaStoreUnavailable, match="the disk of the media store has no space for the 1,000,000 bytes"):
        await flooded(await store_over(objects, capacity_bytes=CONFIGURED))


async def test_mutant_the_oldest_go_whosever_they_are_and_the_tenant_within_its_share_loses_all(
    objects: BucketObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await store_over(objects, capacity_bytes=CONFIGURED)

    def oldest(room: TenantLru[Digest], *_: object) -> Iterator[Digest]:
        while len(store._index):
            yield next(iter(store._index)).id

    monkeypatch.setattr(TenantLru, "victims", oldest)
    umbras, _ = await flooded(store)
    assert umbras == []


async def test_uploads_of_two_tenants_at_once_all_succeed_on_a_full_disk(objects: BucketObjects) -> None:
    store = await store_over(objects, capacity_bytes=CONFIGURED)
    await put(store, "acme", range(FIT))
    async with asyncio.TaskGroup() as group:
        for number in range(3):
            group.create_task(put(store, "umbra", [number]))
            group.create_task(put(store, "acme", [100 + number]))
    assert len(await all_of(store, "umbra")) == 3
    assert store._index.nbytes == sum(file.nbytes for file in store._index)


async def test_small_files_go_until_a_large_one_has_space(objects: BucketObjects) -> None:
    """Each is charged more than it takes."""
    store = await store_over(objects, capacity_bytes=CONFIGURED)
    await put(store, "acme", range(FIT - 1))
    for number in range(64):
        await store.put("acme", upload_of(data(number, 5_000)))
    for number in range(FIT - 1):
        await store.put("acme", upload_of(data(200 + number, 900_000)))
    await store.put("acme", upload_of(data(250, 4 * FILE_BYTES)))
    assert store._index.nbytes <= store._index.capacity


def leftovers(folder: Path) -> list[Path]:
    """Objects that were not written to their end, and folders without one."""
    found = [*folder.rglob("*")]
    return [path for path in found if "#" in path.name or (path.is_dir() and not any(path.iterdir()))]


async def test_nothing_half_written_and_no_empty_folder_is_left(disk: Path) -> None:
    store = await store_over(open_objects(str(disk / "media"), TIMEOUT_S), capacity_bytes=CONFIGURED)
    await put(store, "acme", range(2 * FIT))
    with pytest.raises(MediaStoreUnavailable):
        await store.put("umbra", upload_of(bytes(DISK_BYTES + 1)))
    assert leftovers(disk) == []


async def test_the_capacity_rises_again_when_there_is_space_and_not_above_what_is_configured(disk: Path) -> None:
    (disk / "of others").write_bytes(bytes(DISK_BYTES // 2))
    store = await store_over(open_objects(str(disk / "media"), TIMEOUT_S), capacity_bytes=6 * FILE_BYTES)
    await put(store, "acme", range(6))
    lowered = sample(store, "capacity_bytes")
    assert lowered < DISK_BYTES // 2
    await store.refresh()
    assert sample(store, "capacity_bytes") < 4 * FILE_BYTES, "there is no space for a fourth"
    (disk / "of others").unlink()
    await store.refresh()
    assert sample(store, "capacity_bytes") == 6 * FILE_BYTES
    files = await put(store, "acme", range(10, 16))
    assert await kept(store, "acme", files) == list(range(6))


async def test_what_another_frontend_stored_on_the_same_disk_stays_when_it_is_listed(objects: BucketObjects) -> None:
    one, other = [await store_over(objects, capacity_bytes=CONFIGURED) for _ in range(2)]
    files = await put(one, "acme", range(FIT - 2))
    await put(other, "umbra", range(3))
    assert sample(other, "capacity_bytes") < 3 * FILE_BYTES
    await other.refresh()
    assert await kept(other, "acme", files) == list(range(FIT - 2))


class NeverFits(SmallDisk):
    """A disk that is full, whatever is deleted."""

    is_full = False

    async def put_async(self, path: str, data: bytes, **options: Any) -> Any:  # type: ignore[override]
        if self.is_full:
            self.sizes["of others"] = self.nbytes
        return await super().put_async(path, data, **options)


async def test_a_disk_on_which_deletions_free_nothing_costs_some_files_and_not_all() -> None:
    disk = NeverFits()
    store = await store_over(BucketObjects(disk, TIMEOUT_S), capacity_bytes=CONFIGURED)
    await put(store, "acme", range(FIT - 1))
    disk.is_full = True
    for number in range(20):
        with pytest.raises(MediaStoreUnavailable, match="has no space"):
            await store.put("acme", upload_of(data(100 + number, 500_000)))
    assert len(await all_of(store)) >= FIT - 1 - 3
    errors = sample(store, "errors_total")
    disk.is_full = False
    del disk.sizes["of others"]
    await store.refresh()
    await put(store, "acme", [200])
    assert sample(store, "errors_total") == errors


async def test_a_file_that_no_eviction_makes_space_for_is_503_on_a_small_disk_and_413_in_a_small_store(
    objects: BucketObjects,
) -> None:
    store = await store_over(objects, capacity_bytes=CONFIGURED)
    files = await put(store, "acme", range(FIT - 1))
    with pytest.raises(MediaStoreUnavailable, match="send a smaller one, or try again in a minute"):
        await store.put("umbra", upload_of(bytes(DISK_BYTES + 1)))
    with pytest.raises(MediaTooLarge):
        await store.put("umbra", upload_of(bytes(CONFIGURED + 1)))
    assert sample(store, "errors_total") == 2, "the write, and its refusal"
    assert await kept(store, "acme", files) == list(range(FIT - 1)), "what cannot be stored evicts nothing"


def of_owner(owner: str, number: int, nbytes: int) -> StoredFile:
    times = {"revision": 1, "created_s": number, "expires_s": 1_000_000}
    return StoredFile(
        Digest(number.to_bytes(32, "big")), owner, nbytes, modality=None, purpose="vision", name="", **times
    )


@pytest.mark.parametrize("pauses", [0, 1, 2, 9, None])
def test_shrinking_that_is_ended_in_a_pause_or_in_vain_gives_every_file_back(pauses: int | None) -> None:
    index = FileIndex(1_000 * SMALLEST_BYTES)
    for number in range(200):
        index._enter(of_owner("acme", number, 1))
    before, nbytes = {*index}, index.nbytes
    work = index.shrinking("umbra", 40 * SMALLEST_BYTES, 0)
    if pauses is None:
        work.close()
        with pytest.raises(NoRoom):
            at_once(index.shrinking("umbra", 190 * SMALLEST_BYTES, 0))
    else:
        for _ in range(pauses):
            next(work)
            assert index.nbytes <= index.capacity
        work.close()
    assert ({*index}, index.nbytes, index.nbytes_of("umbra")) == (before, nbytes, 0)
    assert index.capacity in (nbytes, 1_000 * SMALLEST_BYTES)


@pytest.mark.parametrize("owner", ["tenant 0", "another"])
@pytest.mark.parametrize("tenants", [40, 64, 100])
def test_with_many_tenants_a_full_disk_costs_few_files_and_refuses_nobody_within_its_share(
    owner: str, tenants: int
) -> None:
    """A margin that is charged to the uploader was more than its share, and cost it all its files."""
    nbytes, each = 16 * SMALLEST_BYTES, 4
    index = FileIndex(2 * tenants * each * nbytes)
    for number in range(tenants * each):
        index._enter(of_owner(f"tenant {number % tenants}", number, nbytes))
    assert len(at_once(index.shrinking(owner, nbytes, 0))) <= 2
