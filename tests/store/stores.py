"""Media stores for tests: their clock stands still until it is set, and their objects may fail."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3
from obstore.store import LocalStore, MemoryStore

from semel.core import Key
from semel.errors import MediaStoreUnavailable
from semel.store.bindings import BucketBindings
from semel.store.names import StoredFile
from semel.store.objects import BucketObjects, OnEnd
from semel.store.responses import BucketResponses
from semel.store.store import MediaStore
from semel.store.upload import FRONTEND, Payer, Upload

KEY = Key(bytes(range(32)))
MIB = 1 << 20
TIMEOUT_S = 30.0


class Clock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


class FaultyObjects(BucketObjects):
    """Objects that can be gone, full, or slow."""

    def __init__(self, objects: BucketObjects) -> None:
        self.objects = objects
        self.fault: str = ""
        self.calls: list[str] = []
        self.killed_after: int | None = None
        """After so many more writes and deletions nothing happens any more, as if the process had been killed."""
        self.breaks_after: int | None = None
        """After so many more calls it is gone."""

    @property
    def errors(self) -> int:
        return self.objects.errors

    def _enter(self, call: str) -> None:
        self.calls.append(call)
        if self.breaks_after is not None:
            self.breaks_after -= 1
        is_broken = self.breaks_after is not None and self.breaks_after < 0
        if is_broken or self.fault == "gone" or (self.fault == "full" and call == "put"):
            raise MediaStoreUnavailable("the media store failed; its frontend's log says why")
        if self.killed_after is not None and call in ("put", "delete"):
            if not self.killed_after:
                raise asyncio.CancelledError
            self.killed_after -= 1

    async def put(
        self, path: str, data: bytes | bytearray, on_end: OnEnd = lambda _: None, *, payer: Payer = FRONTEND
    ) -> None:
        try:
            self._enter("put")
        except BaseException:
            on_end(False)
            raise
        await self.objects.put(path, data, on_end, payer=payer)

    async def create(self, path: str, data: bytes, *, payer: Payer = FRONTEND) -> bool:
        self._enter("create")
        return await self.objects.create(path, data, payer=payer)

    async def get(self, path: str, nbytes: int, *, start: int = 0, payer: Payer = FRONTEND) -> memoryview | None:
        self._enter("get")
        return await self.objects.get(path, nbytes, start=start, payer=payer)

    async def delete(self, paths: Iterable[str], *, payer: Payer = FRONTEND) -> None:
        for path in paths:
            self._enter("delete")
            await self.objects.delete([path], payer=payer)

    async def free_bytes(self) -> int:
        return await self.objects.free_bytes()

    async def list(self, prefix: str, *, payer: Payer = FRONTEND) -> AsyncIterator[Sequence[tuple[str, int]]]:
        self._enter("list")
        async for page in self.objects.list(prefix, payer=payer):
            yield page


class PlainObjects(BucketObjects):
    """Objects in a dictionary."""

    errors = 0

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    async def put(
        self,
        path: str,
        data: bytes | bytearray,
        on_end: OnEnd = lambda _: None,
        *,
        payer: Payer = FRONTEND,
    ) -> None:
        del payer
        self.objects[path] = bytes(data)
        on_end(True)

    async def create(self, path: str, data: bytes, *, payer: Payer = FRONTEND) -> bool:
        if path in self.objects:
            return False
        await self.put(path, data, payer=payer)
        return True

    async def get(self, path: str, nbytes: int, *, start: int = 0, payer: Payer = FRONTEND) -> memoryview | None:
        del payer
        return memoryview(self.objects[path])[start : start + nbytes] if path in self.objects else None

    async def delete(self, paths: Iterable[str], *, payer: Payer = FRONTEND) -> None:
        del payer
        for path in paths:
            self.objects.pop(path, None)

    async def free_bytes(self) -> int:
        return 1 << 62

    async def list(self, prefix: str, *, payer: Payer = FRONTEND) -> AsyncIterator[Sequence[tuple[str, int]]]:
        del payer
        yield [(path, len(data)) for path, data in self.objects.items() if path.startswith(f"{prefix}/")]


class FullDisk(MemoryStore):
    """What obstore does when the disk is full."""

    async def put_async(self, *_: object, **__: object) -> None:  # type: ignore[override]
        raise OSError(errno.ENOSPC, "No space left on device")


class HungDisk(MemoryStore):
    """A disk that writes nothing until it is woken."""

    def __init__(self) -> None:
        self.begun, self.woken = asyncio.Event(), asyncio.Event()
        self.writes = 0

    async def put_async(self, path: str, data: bytes, **options: Any) -> Any:  # type: ignore[override]
        self.begun.set()
        self.writes += 1
        await self.woken.wait()
        return await super().put_async(path, data, **options)


def on_disk(folder: Path) -> BucketObjects:
    return BucketObjects(LocalStore(folder, mkdir=True, automatic_cleanup=True), TIMEOUT_S, folder)


def in_memory() -> BucketObjects:
    return BucketObjects(MemoryStore(), TIMEOUT_S)


async def store_over(
    objects: BucketObjects,
    clock: Clock | None = None,
    *,
    capacity_bytes: int = 64 * MIB,
    ttl_s: int = 10_000,
    key: Key = KEY,
) -> MediaStore:
    store = MediaStore(objects, key=key, capacity_bytes=capacity_bytes, ttl_s=ttl_s, clock=clock or Clock())
    await store.refresh()
    return store


def responses_over(objects: BucketObjects, files: MediaStore, scope: bytes = b"") -> BucketResponses:
    return BucketResponses(objects, files, key=KEY, scope=scope, max_bytes=16 * MIB)


async def bindings_over(
    objects: BucketObjects, clock: Clock | None = None, *, capacity_bytes: int = 64 * MIB, ttl_s: int = 10_000
) -> BucketBindings:
    """Bindings in a store that has shown that it refuses a second creation."""
    clock = clock or Clock()
    files = await store_over(objects, clock, capacity_bytes=capacity_bytes, ttl_s=ttl_s)
    bindings = BucketBindings(objects, files, key=KEY, ttl_s=ttl_s, clock=clock)
    await bindings.prove()
    return bindings


def upload_of(data: bytes, name: str = "a.png", purpose: str = "vision", ttl_s: int | None = None) -> Upload:
    return Upload(data, blake3(data).digest(), name, purpose, ttl_s)


async def all_of(store: MediaStore, tenant: str = "acme") -> list[StoredFile]:
    page = await store.page(tenant, limit=1_000, order="asc")
    assert page is not None
    return list(page.files)
