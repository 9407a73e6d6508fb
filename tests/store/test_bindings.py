"""Names in a store: what its owner sees of them and can do to them, and a store that cannot share them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from semel.core import Digest, Key
from semel.errors import MediaStoreUnavailable
from semel.store import bindings as bindings_module
from semel.store.bindings import AMBIGUOUS, Binding, BucketBindings
from semel.store.objects import BucketObjects
from semel.store.upload import FRONTEND, Payer
from tests.store.stores import Clock, FaultyObjects, bindings_over, in_memory, on_disk

CAT = Binding(Digest(b"c" * 32), "image", Digest(b"r" * 32), Digest(b"d" * 32))
DOG = Binding(Digest(b"o" * 32), "video", Digest(b"s" * 32), Digest(b"e" * 32))


def stored(folder: Path) -> list[Path]:
    return [Path(home, name) for home, _, names in os.walk(folder / "media-1") for name in names]


async def check_a_record_says_nothing(folder: Path) -> None:
    bindings = await bindings_over(on_disk(folder))
    for name, binding in ((b"a", CAT), (b"b", CAT), (b"c", DOG)):
        await bindings.merge("acme", name, binding)
    await bindings.merge("acme", b"c", CAT)
    await bindings.merge("umbra", b"a", CAT)
    records = [path.read_bytes() for path in stored(folder)]
    assert len({len(record) for record in records}) == 1
    assert len(set(records)) == len({path.parent.name for path in stored(folder)}) == 4
    for record in records:
        for word in (CAT.content, CAT.reference, CAT.digest, DOG.digest, b"image", b"video", bytes(8)):
            assert word not in record


async def test_the_owner_of_a_bucket_reads_nothing_of_a_name_S12(tmp_path: Path) -> None:
    await check_a_record_says_nothing(tmp_path)


async def test_a_mutant_that_does_not_encrypt_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BucketBindings, "_crypt", lambda _, __, fields: fields)
    with pytest.raises(AssertionError):
        await check_a_record_says_nothing(tmp_path)


async def check_a_forged_record_is_refused(folder: Path) -> None:
    """A name that the bucket's owner has touched means nothing, and never another content."""
    for name, binding in ((b"a", CAT), (b"b", DOG)):
        await (await bindings_over(on_disk(folder))).merge("acme", name, binding)
    one, other = stored(folder)
    record, moved = one.read_bytes(), other.read_bytes()
    for forged in (moved, record[:-1] + bytes([record[-1] ^ 1]), record[:40], b"x" * len(record), record + b"x"):
        one.write_bytes(forged)
        bindings = await bindings_over(on_disk(folder))
        found = [await bindings.merge("acme", name, None) for name in (b"a", b"b")]
        assert [found[0], found[1]].count(bindings_module._NO_CONTENT) == 1 or forged == record + b"x"
        assert {one.content for one in found if one is not None} <= {AMBIGUOUS, CAT.content, DOG.content}


async def test_a_record_that_was_changed_or_moved_means_no_content(tmp_path: Path) -> None:
    await check_a_forged_record_is_refused(tmp_path)


async def test_a_mutant_that_believes_records_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bindings_module, "compare_digest", lambda *_: True)
    with pytest.raises((AssertionError, UnicodeDecodeError)):
        await check_a_forged_record_is_refused(tmp_path)


async def test_fleets_with_other_keys_have_other_names(tmp_path: Path) -> None:
    await (await bindings_over(on_disk(tmp_path))).merge("acme", b"a", CAT)
    other = await bindings_over(on_disk(tmp_path))
    other._key = Key(bytes(32))
    assert await other.merge("acme", b"a", None) is None


async def test_a_store_that_overwrites_what_it_should_create_is_found_out_at_once_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def overwrite(self: BucketObjects, path: str, data: bytes, *, payer: Payer = FRONTEND) -> bool:
        await self.put(path, data, payer=payer)
        return True

    monkeypatch.setattr(BucketObjects, "create", overwrite)
    bindings = await bindings_over(in_memory())
    assert not bindings.is_shared
    assert [record.message for record in caplog.records] == [
        (
            "the media store overwrites an object that it was to create (If-None-Match is ignored): names of media "
            "(uuid) are not shared, and each frontend knows those that were sent to it"
        )
    ]
    with pytest.raises(MediaStoreUnavailable):
        await bindings.merge("acme", b"a", CAT)


async def test_a_store_is_proven_at_every_start_with_one_object_and_nothing_is_shared_before() -> None:
    objects = FaultyObjects(in_memory())
    for _ in range(3):
        assert (await bindings_over(objects)).is_shared
    assert objects.calls.count("create") == 4
    assert [path for page in [page async for page in objects.objects.list("")] for path, _ in page] == ["create-probe"]
    objects.fault = "gone"
    with pytest.raises(MediaStoreUnavailable):
        await bindings_over(objects, Clock())


async def test_a_name_costs_a_read_if_it_is_known_and_another_if_not() -> None:
    """Once it is bound. Of what is bound anew, the creation is all that comes to it."""
    objects = FaultyObjects(in_memory())
    bindings = await bindings_over(objects)
    calls: list[Any] = []
    for ours in (None, CAT, None, CAT, DOG, None):
        objects.calls.clear()
        await bindings.merge("acme", b"a", ours)
        calls.append(objects.calls.copy())
    assert calls == [["get", "get"], ["get", "get", "create"], ["get"], ["get"], ["get", "put"], ["get"]]
