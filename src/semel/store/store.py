"""The media store: objects, and the index of them that bounds them.

What is in the objects counts; the index may lag behind what other frontends write to the same bucket, and is compared
with it once a minute. Therefore a file is looked up among the objects themselves, and several frontends may together
exceed the room by what they have stored since. A disk that is smaller than the room is noticed when it is full: then
the room is what was there, and files go for others as they go for room (threats S21). Nothing here is on an event loop
for long: hashing runs in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from blake3 import blake3

from semel.aio import in_slices, run_if_large
from semel.core import Digest, Key
from semel.errors import MediaStoreUnavailable, MediaTooLarge
from semel.media.signature import SIGNATURE_BYTES, kind_of
from semel.store.clock import FileClock
from semel.store.index import FileIndex, NoRoom, Order, Page, newest, renewed
from semel.store.names import (
    ROOT,
    StoredFile,
    file_id,
    matches_content,
    object_folder,
    object_path,
    owner_name,
    parse_object_path,
    short_name,
)
from semel.store.objects import BucketObjects, DiskFull, open_objects
from semel.store.settings import MediaStoreSettings
from semel.store.upload import FRONTEND, Payer, Pin, Spend, Upload, no_pin
from semel.store.write_gate import WriteGate
from semel.telemetry import metrics
from semel.telemetry.logs import SampledLog
from semel.telemetry.meter import Sample

__all__ = ["REFRESH_S", "MediaStore", "open_store"]

REFRESH_S: Final = 60.0
"""Seconds between two comparisons of the index with the objects."""

_PIECE_BYTES: Final = 1 << 20
_EXPIRE_S: Final = 1.0
_FIRST_RETRY_S: Final = 1.0
_FIRST_LISTING_S: Final = 2.0
_DISK_RETRIES: Final = 3
"""Rounds of eviction for a file that a full disk did not take: what is free then is not known before."""

_RENEWALS: Final = 2
"""Number of times that a file may be uploaded again while it is read, and is found under its new name."""

_Charging = Callable[[str, int, float], Generator[None, None, list[StoredFile]]]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Counts:
    queries: int = 0
    hits: int = 0
    evictions: int = 0
    expirations: int = 0
    refusals: int = 0
    """Files that a full disk had no space for."""


class MediaStore:
    """Files of tenants, by content. `refresh` has to succeed once before there are any; `run` keeps to the bounds.

    A tenant sees its own files only: whether another has a file changes neither an answer nor the work for it (threats
    S12). Every call raises `MediaStoreUnavailable` if the store does not answer in time, and then has changed nothing
    that a caller could see. A file is there completely or not at all, also after a process was killed. What one tenant
    has left undone in a slow store is refused to that tenant alone (S18).
    """

    def __init__(
        self,
        objects: BucketObjects,
        *,
        key: Key,
        capacity_bytes: int,
        ttl_s: int,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._objects = objects
        self._key = key
        self._capacity_bytes = capacity_bytes
        self._ttl_s = ttl_s
        self._clock = clock or FileClock()
        self._index = FileIndex(capacity_bytes)
        self._counts = _Counts()
        self._expired: list[StoredFile] = []
        """Out of the index, and to be deleted."""
        self._deleting: set[asyncio.Task[None]] = set()
        self._listed = asyncio.Event()
        self._gate = WriteGate()
        self._disk_evictions = 0
        """Number of times that files went for want of space on the disk."""
        self._may_shrink = True
        """False from a write that failed though files went for it until the next refresh: so it is not all of them."""
        self._full_disk = SampledLog(logger, logging.WARNING)

    def __repr__(self) -> str:
        return f"MediaStore({self._objects!r}, {self._index!r})"

    async def put(self, tenant: str, upload: Upload, pin: Pin = no_pin) -> StoredFile:
        """Store a file. The same bytes of a tenant are the same file, whose name, purpose and expiry are renewed.

        Raises `MediaTooLarge` if the tenant cannot have so much.
        """
        await self._until_listed()
        now_s, nbytes = self._clock(), len(upload.data)
        owner, digest = owner_name(tenant, self._key), file_id(upload.content, tenant, self._key)
        file = StoredFile(
            id=digest,
            owner=owner,
            nbytes=nbytes,
            revision=1,
            created_s=int(now_s),
            expires_s=int(now_s) + min(upload.ttl_s or self._ttl_s, self._ttl_s),
            modality=upload.modality or kind_of(bytes(upload.data[:SIGNATURE_BYTES])),
            purpose=upload.purpose,
            name=short_name(upload.name),
        )
        payer = Payer(owner, pin)
        others = await self._objects_of(payer, digest)
        if others:
            file = renewed(file, others, now_s)
        await self._make_room(nbytes)
        await self._write(file, upload.data, payer)
        await self._try_to_delete((other for other in others if object_path(other) != object_path(file)), payer)
        return file

    async def find(self, tenant: str, digest: Digest) -> StoredFile | None:
        """Return a file of a tenant, without its bytes; None if it has none of this id."""
        await self._until_listed()
        owner, now_s = owner_name(tenant, self._key), self._clock()
        payer = Payer(owner)
        file = newest(await self._objects_of(payer, digest), now_s)
        self._counts.queries += 1
        if file is None:
            self._index.remove(owner, digest)
            return None
        self._counts.hits += 1
        if self._index.get(owner, digest, now_s) is None:
            await self._adopt(file, now_s)
        return file

    async def locate(self, tenant: str, digest: Digest) -> StoredFile | None:
        """Find a file, without a look for one that this process has seen before, even if the store is gone.

        So what another process has deleted may be found for a minute.
        """
        file = self._index.get(owner_name(tenant, self._key), digest, self._clock())
        return await self.find(tenant, digest) if file is None else file

    async def read(
        self, tenant: str, digest: Digest, spend: Spend, pin: Pin = no_pin
    ) -> tuple[StoredFile, memoryview] | None:
        """Return a file of a tenant with its bytes, which are those that were stored, or it is none."""
        if (found := await self.open(tenant, digest, spend, pin, 1 << 62)) is None:
            return None
        file, data = found
        return found if await self._is_stored(file, tenant, blake3(), data) else None

    async def stream(
        self, tenant: str, digest: Digest, spend: Spend, pin: Pin = no_pin
    ) -> tuple[StoredFile, AsyncIterator[memoryview]] | None:
        """Return a file of a tenant with its bytes in pieces of 1 MiB, one of which is in memory and charged at a time.

        The iterator raises `MediaStoreUnavailable` instead of its last piece if the bytes are not those of the upload.
        A file of a single piece is checked before it is returned.
        """
        if (found := await self.open(tenant, digest, spend, pin, _PIECE_BYTES)) is None:
            return None
        file, first = found
        if len(first) == file.nbytes and not await self._is_stored(file, tenant, blake3(), first):
            return None
        return file, self._pieces(file, tenant, first, Payer(file.owner, pin))

    async def open(
        self, tenant: str, digest: Digest, spend: Spend, pin: Pin, most: int
    ) -> tuple[StoredFile, memoryview] | None:
        """Find a file and read its beginning, of so many bytes at most, unchecked. They are spent once."""
        data, spent = None, False
        for _ in range(1 + _RENEWALS):  # it may be deleted meanwhile, or uploaded again, under another name
            if data is not None or (file := await self.find(tenant, digest)) is None:
                break
            if not spent:
                spend(min(file.nbytes, most))
                spent = True
            data = await self._objects.get(object_path(file), min(file.nbytes, most), payer=Payer(file.owner, pin))
        return None if file is None or data is None else (file, data)

    async def _pieces(
        self, file: StoredFile, tenant: str, piece: memoryview, payer: Payer
    ) -> AsyncGenerator[memoryview, None]:
        """Yield a file's pieces; the last one only if all of them are what was stored."""
        hasher, end = blake3(), len(piece)
        while end < file.nbytes:
            hasher.update(piece)  # 0.3 ms
            yield piece
            more = await self._objects.get(
                object_path(file), min(_PIECE_BYTES, file.nbytes - end), start=end, payer=payer
            )
            if not more:
                raise MediaStoreUnavailable("the file was deleted while it was read; ask for it again")
            piece, end = more, end + len(more)
        if not await self._is_stored(file, tenant, hasher, piece):
            raise MediaStoreUnavailable("the file is not as it was stored; upload it again")
        yield piece

    async def _is_stored(self, file: StoredFile, tenant: str, hasher: blake3, last: memoryview) -> bool:
        """Check that the bytes that were hashed, with the last ones, are those of the file."""
        content = (await run_if_large(partial(hasher.update, last), len(last))).digest()
        if matches_content(file.id, content, tenant, self._key):
            return True
        logger.error("an object of the media store has not the bytes that were stored: it is answered as unknown")
        self._index.remove(file.owner, file.id)
        return False

    async def get(self, file: StoredFile) -> memoryview | None:
        """Return the bytes of a file whose object's name is known without a look, unchecked, if it is there."""
        self._index.get(file.owner, file.id, self._clock())
        return await self._objects.get(object_path(file), file.nbytes, payer=Payer(file.owner))

    async def create(self, file: StoredFile, data: bytes) -> bool:
        """Write a file unless there is an object of its name. Returns whether it was written; others go for it."""
        try:
            evicted = await in_slices(self._index.reserving(file.owner, file.nbytes, self._clock()))
        except NoRoom:
            raise MediaStoreUnavailable("the media store has no room; raise it with --media-store-gb") from None
        is_written = False
        try:
            await self._evict(evicted)
            is_written = await self._objects.create(object_path(file), data, payer=Payer(file.owner))
        finally:
            self._end_write(file, is_written)
        return is_written

    async def delete(self, tenant: str, digest: Digest) -> bool:
        """Delete a file of a tenant. Returns whether there was one."""
        await self._until_listed()
        owner = owner_name(tenant, self._key)
        payer = Payer(owner)
        files = await self._objects_of(payer, digest)
        was_there = newest(files, self._clock()) is not None
        await self._objects.delete([object_path(file) for file in files], payer=payer)
        self._index.remove(owner, digest)
        return was_there

    async def page(
        self, tenant: str, *, limit: int, order: Order = "desc", purpose: str = "", after: Digest | None = None
    ) -> Page | None:
        """List files of a tenant by the time of their upload; None if it lacks the one that they are to follow."""
        await self._until_listed()
        owner, now_s = owner_name(tenant, self._key), self._clock()
        return self._index.page(owner, now_s, limit=limit, order=order, purpose=purpose, after=after)

    async def refresh(self) -> None:
        """Bring the index up to the objects, and keep to its bounds."""
        listing, now_s = self._index.listing(), self._clock()
        self._may_shrink = True
        replaced: list[StoredFile] = []
        async for page in self._objects.list(ROOT):
            files = [file for path, nbytes in page if (file := parse_object_path(path, nbytes)) is not None]
            replaced += listing.add(file for file in files if file.expires_s > now_s)
            replaced += (expired := [file for file in files if file.expires_s <= now_s])
            self._counts.expirations += len(expired)
        if self._index.is_shrunk:
            self._index.grow(listing.nbytes, await self._objects.free_bytes())
        for evicted in listing.finish(self._clock()):
            await self._evict(evicted)
            await asyncio.sleep(0)
        self._listed.set()
        await self._try_to_delete(replaced, FRONTEND)
        await self.expire()

    async def expire(self) -> None:
        """Delete what has expired."""
        while self._forget_expired() or self._expired:
            gone, self._expired = self._expired, []
            await self._try_to_delete(gone, FRONTEND)

    async def run(self) -> None:
        """Keep the index up to the objects, for ever. A store that does not answer is tried again, less and less."""
        retry_s = _FIRST_RETRY_S
        while True:
            try:
                await self.refresh()
            except MediaStoreUnavailable:
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, REFRESH_S)
                continue
            retry_s, until_s = _FIRST_RETRY_S, time.monotonic() + REFRESH_S
            while time.monotonic() < until_s:
                await asyncio.sleep(_EXPIRE_S)
                await self.expire()

    def samples(self) -> Iterator[Sample]:
        """Return what the store has, and what became of it."""
        yield metrics.MEDIA_STORE_FILES, len(self._index), ()
        yield metrics.MEDIA_STORE_BYTES, self._index.nbytes, ()
        yield metrics.MEDIA_STORE_CAPACITY, self._index.capacity, ()
        yield metrics.MEDIA_STORE_QUERIES, self._counts.queries, ()
        yield metrics.MEDIA_STORE_HITS, self._counts.hits, ()
        yield metrics.MEDIA_STORE_EVICTIONS, self._counts.evictions, ()
        yield metrics.MEDIA_STORE_EXPIRATIONS, self._counts.expirations, ()
        yield metrics.MEDIA_STORE_ERRORS, self._objects.errors + self._counts.refusals, ()

    def _forget_expired(self) -> bool:
        """Some files that have expired take no room any more; their objects are deleted by the next `expire`."""
        gone = self._index.expire(self._clock())
        self._counts.expirations += len(gone)
        self._expired += gone
        return bool(gone)

    async def _make_room(self, nbytes: int) -> None:
        """Of what has expired, rather than at the expense of others. Nobody waits until that is deleted."""
        while not self._index.fits(nbytes):
            if not self._forget_expired():
                return
            await asyncio.sleep(0)

    async def _write(self, file: StoredFile, data: bytes | bytearray, payer: Payer) -> None:
        """Write a file, for which others go if there is no room, or no space on the disk."""
        evictions = self._disk_evictions
        try:
            async with self._gate.together():
                return await self._write_charged(file, data, payer, self._index.reserving)
        except DiskFull:
            pass
        if self._may_shrink:
            async with self._gate.alone():
                if evictions != self._disk_evictions:  # of others meanwhile: there may be space
                    with contextlib.suppress(DiskFull):
                        return await self._write_charged(file, data, payer, self._index.reserving)
                for _ in range(_DISK_RETRIES):
                    self._disk_evictions += 1
                    with contextlib.suppress(DiskFull):
                        return await self._write_charged(file, data, payer, self._index.shrinking)
                self._may_shrink = False
        raise self._no_space(file)

    async def _write_charged(
        self, file: StoredFile, data: bytes | bytearray, payer: Payer, charging: _Charging
    ) -> None:
        """Charge a file, delete what has to go for it, and write it."""
        capacity = self._index.capacity
        try:
            evicted = await in_slices(charging(file.owner, file.nbytes, self._clock()))
        except NoRoom:
            if self._index.is_shrunk and file.nbytes <= self._capacity_bytes:
                raise self._no_space(file) from None
            raise MediaTooLarge(
                f"the file has {file.nbytes:,} bytes, and the media store has no room for it: send a smaller one, or "
                "raise it with --media-store-gb"
            ) from None
        if self._index.capacity < capacity:
            self._full_disk.log(
                "the disk of the media store is full: its capacity is %d bytes until there is more space, not %d "
                "(--media-store-gb)",
                self._index.capacity,
                self._capacity_bytes,
            )
        try:
            await self._evict(evicted)
        except BaseException:
            self._index.cancel(file.owner, file.nbytes)
            raise
        await self._objects.put(object_path(file), data, partial(self._end_write, file), payer=payer)

    def _no_space(self, file: StoredFile) -> MediaStoreUnavailable:
        self._counts.refusals += 1
        return MediaStoreUnavailable(
            f"the disk of the media store has no space for the {file.nbytes:,} bytes of the file: delete files, send a "
            "smaller one, or try again in a minute"
        )

    def _end_write(self, file: StoredFile, is_written: bool) -> None:
        """End a write, also if its client has not waited for it."""
        if is_written:
            self._index.commit(file)
        else:
            self._index.cancel(file.owner, file.nbytes)

    async def _until_listed(self) -> None:
        """Wait for the first listing, after the frontend's start, for a moment."""
        if not self._listed.is_set():
            try:
                await asyncio.wait_for(self._listed.wait(), _FIRST_LISTING_S)
            except TimeoutError:
                raise MediaStoreUnavailable("the media store is being read; try again in a moment") from None

    async def _objects_of(self, payer: Payer, digest: Digest) -> list[StoredFile]:
        """Return the objects of one file: usually one, two after a process was killed while it renewed it."""
        found: list[StoredFile] = []
        async for page in self._objects.list(object_folder(payer.owner, digest), payer=payer):
            found += [file for path, nbytes in page if (file := parse_object_path(path, nbytes)) is not None]
        return found

    async def _adopt(self, file: StoredFile, now_s: float) -> None:
        """Enter a file that another frontend has stored. Without room it is not entered, and the next listing looks."""
        try:
            evicted = await in_slices(self._index.reserving(file.owner, file.nbytes, now_s))
        except NoRoom:
            return
        self._index.commit(file)
        await self._evict(evicted)

    async def _evict(self, files: list[StoredFile]) -> None:
        """Delete what had to go. That goes on if the client for whom it had to has gone."""
        if not files:
            return
        self._counts.evictions += len(files)
        deleting = asyncio.create_task(self._try_to_delete(files, FRONTEND))
        self._deleting.add(deleting)
        deleting.add_done_callback(self._deleting.discard)
        await asyncio.shield(deleting)

    async def _try_to_delete(self, files: Iterable[StoredFile], payer: Payer) -> None:
        """Delete objects. What cannot be deleted now is found by the next listing."""
        try:
            await self._objects.delete([object_path(file) for file in files], payer=payer)
        except MediaStoreUnavailable:
            return


def open_store(settings: MediaStoreSettings, key: Key) -> MediaStore | None:
    """Return the store that the settings name, if they do."""
    if settings.location is None:
        return None
    objects = open_objects(settings.location, settings.timeout_s)
    return MediaStore(objects, key=key, capacity_bytes=settings.capacity_bytes, ttl_s=settings.ttl_s)
