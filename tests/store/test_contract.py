"""Every kind of media store, held to the one contract."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from semel.core import Digest, Key, Tenant
from semel.errors import MediaTooLarge
from semel.media.fetch.freshness import Freshness
from semel.media.fetch.responses import StoredResponse
from semel.media.fetch.url import WebUrl
from semel.store.bindings import AMBIGUOUS, Binding, BucketBindings
from semel.store.index import SMALLEST_BYTES
from semel.store.names import file_id, object_path, owner_name
from semel.store.objects import BucketObjects, open_objects
from semel.store.store import MediaStore
from tests.store.s3 import BUCKET, S3_VARIABLES, s3_server
from tests.store.stores import (
    TIMEOUT_S,
    Clock,
    all_of,
    bindings_over,
    in_memory,
    on_disk,
    responses_over,
    store_over,
    upload_of,
)

KINDS = ("memory", "disk", pytest.param("s3", marks=[pytest.mark.slow, pytest.mark.timeout(300)]))


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_server(tmp_path_factory.mktemp("s3")) as endpoint:
        yield endpoint


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=KINDS)
def objects(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BucketObjects:
    if request.param == "memory":
        return in_memory()
    if request.param == "disk":
        return on_disk(tmp_path / "media")
    for name, value in S3_VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("s3"))
    return open_objects(f"s3://{BUCKET}/{tmp_path.name}", TIMEOUT_S)


@pytest.fixture
async def store(objects: BucketObjects, clock: Clock) -> AsyncIterator[MediaStore]:
    yield await store_over(objects, clock)


async def read(store: MediaStore, tenant: str, digest: Digest) -> bytes | None:
    found = await store.read(tenant, digest, lambda _: None)
    return None if found is None else bytes(found[1])


async def test_what_is_stored_is_found_read_and_listed(store: MediaStore, clock: Clock) -> None:
    file = await store.put("acme", upload_of(b"pixels", "screen 1.png"))
    assert (file.nbytes, file.name, file.purpose) == (6, "screen 1.png", "vision")
    assert (file.created_s, file.expires_s) == (clock.now_s, clock.now_s + 10_000)
    assert await store.find("acme", file.id) == file
    assert await read(store, "acme", file.id) == b"pixels"
    assert await all_of(store) == [file]


async def test_an_empty_and_a_large_file_are_stored(store: MediaStore) -> None:
    for data in (b"", os.urandom(6_000_000)):
        file = await store.put("acme", upload_of(data))
        assert await read(store, "acme", file.id) == data


async def test_the_same_bytes_are_the_same_file_with_the_latest_name_and_the_later_expiry(
    store: MediaStore, clock: Clock
) -> None:
    first = await store.put("acme", upload_of(b"pixels", "a.png"))
    clock.now_s += 100
    again = await store.put("acme", upload_of(b"pixels", "b.png", "user_data", ttl_s=1))
    assert (again.id, again.name, again.purpose) == (first.id, "b.png", "user_data")
    assert (again.created_s, again.expires_s) == (first.created_s, first.expires_s)
    later = await store.put("acme", upload_of(b"pixels", "b.png", "user_data"))
    assert later.expires_s == first.expires_s + 100
    assert await all_of(store) == [later]
    await store.refresh()
    assert await all_of(store) == [later]


async def test_a_tenant_has_its_own_files_only_S12(store: MediaStore) -> None:
    theirs = await store.put("acme", upload_of(b"pixels"))
    ours = await store.put("umbra", upload_of(b"pixels"))
    assert ours.id != theirs.id
    assert await store.find("umbra", theirs.id) is None
    assert await read(store, "umbra", theirs.id) is None
    assert not await store.delete("umbra", theirs.id)
    assert await store.page("umbra", limit=1, after=theirs.id) is None
    assert await all_of(store, "umbra") == [ours]
    assert await read(store, "acme", theirs.id) == b"pixels"


async def test_what_is_deleted_is_gone_also_from_the_objects(store: MediaStore, objects: BucketObjects) -> None:
    file = await store.put("acme", upload_of(b"pixels"))
    assert await store.delete("acme", file.id)
    assert not await store.delete("acme", file.id)
    assert await store.find("acme", file.id) is None
    assert not await all_of(store)
    assert not [page async for page in objects.list("media-1") if page]


async def test_what_has_expired_is_gone_at_once_and_soon_from_the_objects(
    store: MediaStore, objects: BucketObjects, clock: Clock
) -> None:
    short = await store.put("acme", upload_of(b"short", ttl_s=50))
    long = await store.put("acme", upload_of(b"long", ttl_s=99_999))
    assert long.expires_s == clock.now_s + 10_000  # no longer than the store keeps anything
    clock.now_s += 50
    assert await store.find("acme", short.id) is None
    assert not await store.delete("acme", short.id)
    assert await all_of(store) == [long]
    await store.expire()
    assert [path for page in [page async for page in objects.list("media-1")] for path, _ in page] == [
        object_path(long)
    ]


async def test_the_oldest_files_go_when_the_store_is_full(objects: BucketObjects, clock: Clock) -> None:
    store = await store_over(objects, clock, capacity_bytes=4 * SMALLEST_BYTES)
    files = [await store.put("acme", upload_of(bytes([one]))) for one in range(6)]
    assert await read(store, "acme", files[0].id) is None
    assert [await read(store, "acme", file.id) for file in files[2:]] == [bytes([one]) for one in range(2, 6)]
    names = [path for page in [page async for page in objects.list("media-1")] for path, _ in page]
    assert sorted(names) == sorted(object_path(file) for file in files[2:])
    with pytest.raises(MediaTooLarge, match="--media-store-gb"):
        await store.put("acme", upload_of(bytes(5 * SMALLEST_BYTES)))


async def test_files_are_listed_page_by_page_in_either_order(store: MediaStore, clock: Clock) -> None:
    files = []
    for one in range(5):
        clock.now_s += 1
        files.append(await store.put("acme", upload_of(bytes([one]), purpose=("vision", "user_data")[one % 2])))
    page = await store.page("acme", limit=2)
    assert page is not None
    assert (list(page.files), page.has_more) == ([files[4], files[3]], True)
    page = await store.page("acme", limit=3, after=files[3].id)
    assert page is not None
    assert (list(page.files), page.has_more) == ([files[2], files[1], files[0]], False)
    page = await store.page("acme", limit=9, order="asc", purpose="user_data", after=files[0].id)
    assert page is not None
    assert list(page.files) == [files[1], files[3]]


async def test_a_restart_finds_every_file_again(store: MediaStore, objects: BucketObjects, clock: Clock) -> None:
    files = []
    for one in range(5):
        clock.now_s += 1
        files.append(await store.put(("acme", "umbra")[one % 2], upload_of(bytes([one]), f"{one} é.png")))
    again = await store_over(objects, clock)
    assert await all_of(again, "acme") == files[::2]
    assert await all_of(again, "umbra") == files[1::2]
    assert [await read(again, "acme", file.id) for file in files[::2]] == [bytes([one]) for one in (0, 2, 4)]


async def test_two_frontends_share_a_store(store: MediaStore, objects: BucketObjects, clock: Clock) -> None:
    other = await store_over(objects, clock)
    file = await store.put("acme", upload_of(b"pixels"))
    assert await read(other, "acme", file.id) == b"pixels"
    assert await all_of(other) == [file]
    assert await other.delete("acme", file.id)
    assert await store.find("acme", file.id) is None
    assert await read(store, "acme", file.id) is None
    second = await other.put("acme", upload_of(b"more"))
    await store.refresh()
    assert await all_of(store) == [second]


async def test_fleets_with_different_keys_keep_apart_and_share_the_room(objects: BucketObjects, clock: Clock) -> None:
    one = await store_over(objects, clock, capacity_bytes=4 * SMALLEST_BYTES)
    for content in range(4):
        await one.put("acme", upload_of(bytes([content])))
    other = await store_over(objects, clock, capacity_bytes=4 * SMALLEST_BYTES, key=Key(bytes(32)))
    assert not await all_of(other)
    for content in range(4):
        await other.put("acme", upload_of(bytes([content])))
    assert len(await all_of(other)) == 2
    await one.refresh()
    assert len(await all_of(one)) == 2


async def test_bytes_that_are_not_those_of_the_id_are_no_file_S11(store: MediaStore, objects: BucketObjects) -> None:
    file = await store.put("acme", upload_of(b"pixels"))
    await objects.put(object_path(file), b"forged")
    assert await read(store, "acme", file.id) is None


async def test_objects_of_others_in_the_same_bucket_are_left_alone(store: MediaStore, objects: BucketObjects) -> None:
    digest = file_id(b"x", "acme", Key(bytes(range(32))))
    strange = f"media-1/{owner_name('acme', Key(bytes(range(32))))}/{digest.hex()}/backup.tar"
    for path in ("media-1/readme.txt", strange, "elsewhere/a.png"):
        await objects.put(path, b"theirs")
    await store.refresh()
    assert await store.find("acme", digest) is None
    await store.delete("acme", digest)
    for path in ("media-1/readme.txt", strange, "elsewhere/a.png"):
        assert bytes(await objects.get(path, 6) or b"") == b"theirs"


async def test_the_bytes_of_a_file_are_spent_before_they_are_read(store: MediaStore) -> None:
    file = await store.put("acme", upload_of(b"pixels"))
    spent: list[int] = []

    def refuse(nbytes: int) -> None:
        spent.append(nbytes)
        raise MediaTooLarge

    with pytest.raises(MediaTooLarge):
        await store.read("acme", file.id, refuse)
    assert spent == [6]


async def test_one_of_several_leases_is_taken_and_a_response_is_as_it_was_written(objects: BucketObjects) -> None:
    """Of stores over the same objects, as several frontends have them."""
    frontends = [responses_over(objects, await store_over(objects)) for _ in range(4)]
    key = Tenant("acme"), WebUrl("https", "cat.example", 443, "/")
    for _ in range(3):
        assert sorted(await asyncio.gather(*(one.take_lease(key, 60.0) for one in frontends))) == [False] * 3 + [True]
        assert 1.0 < (await frontends[0].lease_left_s(key) or 0.0) <= 60.0
        await frontends[1].end_lease(key)
        await frontends[2].end_lease(key)
        assert await frontends[3].lease_left_s(key) is None
    response = StoredResponse(os.urandom(3_000_000), Freshness(1.0, 2.0, 3.0, True, {"etag": '"1"'}, True), (key[1],))
    assert await frontends[0].read(key, lambda _: None) is None
    await frontends[0].write(key, response)
    assert await frontends[1].read(key, lambda _: None) == response
    await frontends[2].delete(key)
    assert await frontends[3].read(key, lambda _: None) is None


def binding(content: int) -> Binding:
    return Binding(Digest(bytes([content]) * 32), "image", Digest(bytes([8]) * 32), Digest(bytes([9]) * 32))


async def bound(bindings: BucketBindings, name: bytes, ours: Binding | None = None, tenant: str = "acme") -> int | None:
    """The number of the content that a name is bound to; 0 if it is ambiguous."""
    found = await bindings.merge(tenant, name, ours)
    return None if found is None else found.content[0]


async def test_of_several_frontends_that_bind_a_name_at_once_one_wins_and_the_others_agree_or_refuse(
    objects: BucketObjects, clock: Clock
) -> None:
    frontends = [await bindings_over(objects, clock) for _ in range(4)]
    for name in (b"a", b"b", b"c"):
        assert [await bound(one, name) for one in frontends] == [None] * 4
        contents = await asyncio.gather(*(bound(one, name, binding(5)) for one in frontends))
        assert contents == [5] * 4
        assert await frontends[3].merge("acme", name, None) == binding(5)
    contents = await asyncio.gather(*(bound(one, b"d", binding(1 + index)) for index, one in enumerate(frontends)))
    assert sum(content != AMBIGUOUS[0] for content in contents) == 1
    assert [await bound(one, b"d") for one in frontends] == [0] * 4
    assert [await bound(one, b"d", binding(7)) for one in frontends] == [0] * 4


async def test_a_name_is_bound_for_its_tenant_alone_S12(objects: BucketObjects, clock: Clock) -> None:
    one, other = [await bindings_over(objects, clock) for _ in range(2)]
    assert await bound(one, b"a", binding(1)) == 1
    assert await bound(other, b"a", tenant="umbra") is None
    assert await bound(other, b"a", binding(2), "umbra") == 2
    assert await bound(other, b"a") == 1


async def test_a_name_that_is_used_lives_on_and_one_that_is_not_expires(objects: BucketObjects, clock: Clock) -> None:
    bindings = await bindings_over(objects, clock, ttl_s=100)
    for name in (b"used", b"unused"):
        assert await bound(bindings, name, binding(1)) == 1
    for _ in range(6):
        clock.now_s += 50
        assert await bound(await bindings_over(objects, clock, ttl_s=100), b"used") == 1
    assert await bound(bindings, b"unused") is None
    assert await bound(bindings, b"unused", binding(2)) == 2
    for _ in range(2):  # what has expired is deleted
        await bindings._files.refresh()
    assert len([path for page in [page async for page in objects.list("media-1")] for path, _ in page]) == 3


async def test_names_are_bounded_and_those_of_the_tenant_with_most_go_first(
    objects: BucketObjects, clock: Clock
) -> None:
    bindings = await bindings_over(objects, clock, capacity_bytes=8 * SMALLEST_BYTES)
    assert await bound(bindings, b"a", binding(1), "umbra") == 1
    for number in range(20):
        assert await bound(bindings, b"%d" % number, binding(2)) == 2
    assert len(bindings._files._index) == 8
    assert await bound(bindings, b"a", None, "umbra") == 1
    assert [await bound(bindings, b"%d" % number) for number in (0, 12, 13, 19)] == [None, None, 2, 2]
