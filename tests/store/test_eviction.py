"""Eviction of many files at once: the event loop has its turns, and a client that leaves leaves no object behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Iterable, Iterator
from statistics import median

import pytest

from semel.aio import at_once
from semel.core import Digest
from semel.store.index import SMALLEST_BYTES, FileIndex, NoRoom
from semel.store.names import StoredFile
from semel.store.store import MediaStore
from semel.store.upload import FRONTEND, Payer
from tests.store.stores import FaultyObjects, all_of, in_memory, store_over, upload_of
from tests.waiting import until

FILES = 163_840
EVICTED = 1_024
TURN_S = 0.010


def file_of(owner: str, number: int) -> StoredFile:
    return StoredFile(
        id=Digest(number.to_bytes(32, "big")),
        owner=owner,
        nbytes=1,
        revision=1,
        created_s=number,
        expires_s=1_000_000 + number,
        modality="image",
        purpose="vision",
        name="a.png",
    )


def index_of(files: int, owner: str = "acme") -> FileIndex:
    index = FileIndex(files * SMALLEST_BYTES)
    for number in range(files):
        index._enter(file_of(owner, number))
    return index


def turns_of(work: Iterator[None]) -> Iterator[float]:
    """The CPU time of each turn."""
    while True:
        began = time.thread_time()
        try:
            next(work)
        except StopIteration:
            return
        finally:
            yield time.thread_time() - began


@pytest.mark.slow
def test_no_turn_of_an_eviction_of_a_thousand_files_is_long() -> None:
    index = index_of(FILES)
    gc.collect()
    gc.disable()  # what the collector takes is not the eviction's
    try:
        turns = sorted(turns_of(index.reserving("umbra", EVICTED * SMALLEST_BYTES, 0)))
    finally:
        gc.enable()
    assert len(index) == FILES - EVICTED
    assert turns[-2] < TURN_S, "but for one, in which the machine may have done something else"
    assert len(turns) >= EVICTED // 64
    began = time.thread_time()
    at_once(index.reserving("umbra", EVICTED * SMALLEST_BYTES, 0))
    assert time.thread_time() - began > 4 * median(turns), "the control shows nothing: all at once is as quick"


@pytest.mark.parametrize("pauses", [0, 1, 2, 3])
def test_an_eviction_that_is_ended_in_a_pause_changes_nothing(pauses: int) -> None:
    index = index_of(400)
    before = {*index}, index.nbytes, index.nbytes_of("acme")
    work = index.reserving("umbra", 150 * SMALLEST_BYTES, 0)
    for _ in range(pauses):
        next(work)
        assert index.nbytes <= index.capacity
        with pytest.raises(NoRoom):
            index.reserve("globex", 401 * SMALLEST_BYTES, 0)
    work.close()
    assert ({*index}, index.nbytes, index.nbytes_of("acme")) == before
    assert index.nbytes_of("umbra") == 0


def test_what_has_become_free_in_a_pause_is_not_taken_by_another() -> None:
    index = index_of(200)
    work = index.reserving("umbra", 60 * SMALLEST_BYTES, 0)
    next(work)
    gone = index.reserve("globex", 1, 0)
    assert len(gone) == 1, "it has to evict one itself"
    at_once(work)
    assert index.nbytes == index.capacity
    assert index.nbytes_of("umbra") == 60 * SMALLEST_BYTES


class SlowDeletion(FaultyObjects):
    """Objects whose deletion waits."""

    def __init__(self) -> None:
        super().__init__(in_memory())
        self.begun, self.let = asyncio.Event(), asyncio.Event()
        self.deleted = 0

    async def delete(self, paths: Iterable[str], *, payer: Payer = FRONTEND) -> None:
        if doomed := [*paths]:
            self.begun.set()
            await self.let.wait()
            await super().delete(doomed, payer=payer)
            self.deleted += len(doomed)


async def unindexed(monkeypatch: pytest.MonkeyPatch | None) -> int:
    """The objects that are in no index after a client has left while files had to go for its own."""
    objects = SlowDeletion()
    store = await store_over(objects, capacity_bytes=8 * SMALLEST_BYTES)
    if monkeypatch is not None:
        monkeypatch.setattr(MediaStore, "_evict", lambda self, files: self._try_to_delete(files, FRONTEND))
    for number in range(8):
        await store.put("acme", upload_of(bytes([number])))
    putting = asyncio.create_task(store.put("umbra", upload_of(bytes(4 * SMALLEST_BYTES))))
    await objects.begun.wait()
    putting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await putting
    objects.let.set()
    if monkeypatch is None:
        await until(lambda: objects.deleted == 4)
    else:
        await asyncio.sleep(0.1)  # it is not deleted any more
    listed = [path async for page in objects.objects.list("") for path, _ in page]
    return len(listed) - len(await all_of(store)) - len(await all_of(store, "umbra"))


async def test_an_eviction_goes_on_when_its_client_leaves() -> None:
    assert await unindexed(None) == 0


async def test_control_an_eviction_that_ends_with_its_client_leaves_objects_in_no_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert await unindexed(monkeypatch) == 4
