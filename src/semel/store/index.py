"""Index of a media store: its files, expiry and eviction. Pure: no I/O, no clock.

Files are a tenant's property, and tenants share the room as they share a cache's (`fairness.tenant_lru`): alone, a
tenant has all of it; while others have files, who has more than an equal share yields first, its least recently
used files before others. A file that is being written has its room from the beginning, and cannot be evicted (threats
S21).

On a disk that is smaller than the configured capacity, the capacity is what fits there (`shrinking`, `grow`).

The index is a copy of what the objects say. Other frontends write to the same bucket, so it is compared with a listing
again and again (`Listing`), in slices: between any two of them the index is whole, and files come and go.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import islice
from typing import Final, Literal, NamedTuple

from semel.aio import at_once
from semel.core import Digest
from semel.fairness.tenant_lru import TenantLru
from semel.store.names import StoredFile

__all__ = [
    "IDLE_S",
    "SMALLEST_BYTES",
    "FileIndex",
    "Listing",
    "NoRoom",
    "Order",
    "Page",
    "charged_bytes",
    "newest",
    "renewed",
]

SMALLEST_BYTES: Final = 64 * 1024
"""Bytes charged for the smallest file: so the capacity bounds the number of files, and the memory of their index."""

IDLE_S: Final = 86_400.0
"""A tenant that has used none of its files for a day is entitled to no share, once others need the room."""

Order = Literal["asc", "desc"]
_Rank = tuple[int, Digest]
_SLICE: Final = 64
"""Files that are dealt with at once: with 160,000 files, 64 of them take 5 ms."""

_EVICTIONS: Final = 8
"""Files that go between two pauses."""

_MARGIN: Final = 64
"""This part of a full disk stays free: for folders, and for what others write to it."""

_GROWTH_MARGIN: Final = 16
"""This part has to be free before the capacity grows again, so that it does not grow into the margin above."""

_BLOCK_BYTES: Final = 4_096


class NoRoom(Exception):
    """A file is larger than what its owner can have."""


@dataclass(frozen=True, slots=True)
class Page:
    """Some files of one owner, in order."""

    files: tuple[StoredFile, ...] = ()
    has_more: bool = False


class _Entry(NamedTuple):
    file: StoredFile
    serial: int
    """Larger than that of every entry that was made before it."""


_NOBODY_S: Final = _Entry(
    StoredFile(
        Digest(bytes(Digest.size)),
        "-" * 49,
        0,
        revision=0,
        created_s=0,
        expires_s=0,
        modality=None,
        purpose="",
        name="",
    ),
    0,
)
"""Stands for a file that is not there, so that to look for it takes the steps of a foreign one (threats S12)."""


def charged_bytes(nbytes: int) -> int:
    """Return what a file of so many bytes takes of the room."""
    return max(nbytes, SMALLEST_BYTES)


def renewed(file: StoredFile, others: Sequence[StoredFile], now_s: float) -> StoredFile:
    """Return a file of which there are objects: under the same date, with the later expiry, unless they have expired.

    It counts more than any of them, also if they cannot be deleted.
    """
    file = replace(file, revision=1 + max(other.revision for other in others))
    if (existing := newest(others, now_s)) is None:
        return file
    return replace(file, created_s=existing.created_s, expires_s=max(file.expires_s, existing.expires_s))


def newest(files: Iterable[StoredFile], now_s: float) -> StoredFile | None:
    """Choose the object of a file that counts, unless it has expired."""
    file = max(files, key=_order, default=None)
    return None if file is None or file.expires_s <= now_s else file


class FileIndex:
    """The files of a store. The sum of their charges and of those that are being written never exceeds the capacity."""

    def __init__(self, capacity_bytes: int, *, idle_s: float = IDLE_S) -> None:
        self._now_s = 0.0
        self._max_capacity = capacity_bytes
        self._room: TenantLru[Digest] = TenantLru(capacity_bytes, lambda: self._now_s, idle_s=idle_s)
        self._entries: dict[Digest, _Entry] = {}
        self._ranks: dict[tuple[str, str], list[_Rank]] = {}
        """By owner and purpose, and by owner alone (""): what its files are listed in the order of."""
        self._expiries: list[_Rank] = []
        """In order."""
        self._serial = 0
        self._listing: Listing | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[StoredFile]:
        return (entry.file for entry in self._entries.values())

    def __repr__(self) -> str:
        return f"FileIndex({len(self)} files, {self._room!r})"

    @property
    def capacity(self) -> int:
        """All bytes: those that it was made with, or fewer on a full disk."""
        return self._room.shares.capacity

    @property
    def is_shrunk(self) -> bool:
        """True if the capacity is less than it was made with."""
        return self._room.shares.capacity < self._max_capacity

    @property
    def nbytes(self) -> int:
        """The bytes that are charged."""
        return self._room.shares.total

    def fits(self, nbytes: int) -> bool:
        """Return whether a file of so many bytes has room without another that goes."""
        return self._room.shares.fits(charged_bytes(nbytes))

    def nbytes_of(self, owner: str) -> int:
        """The bytes that an owner is charged."""
        return self._room.shares[owner]

    def get(self, owner: str, digest: Digest, now_s: float) -> StoredFile | None:
        """Return a file of an owner, which becomes its most recently used; None if it has none, or it is expired."""
        self._now_s = max(now_s, self._now_s)
        entry = self._entries.get(digest, _NOBODY_S)
        if entry.file.owner != owner or entry.file.expires_s <= now_s:
            return None
        self._room.use(owner, digest)
        return entry.file

    def reserve(self, owner: str, nbytes: int, now_s: float) -> list[StoredFile]:
        """Charge a file that is to be written, without a pause."""
        return at_once(self.reserving(owner, nbytes, now_s))

    def reserving(self, owner: str, nbytes: int, now_s: float) -> Generator[None, None, list[StoredFile]]:
        """Charge a file that is to be written. Returns the files that had to go, which are out of the index.

        Raises `NoRoom` if there is none for it; then, and if it is ended in a pause, everything stays. In a pause what
        has become free is charged already, so that it is there for the file, or for those that come back.
        """
        self._now_s = max(now_s, self._now_s)
        left, charged = charged_bytes(nbytes), 0
        if not self._room.shares.fits(left) and not self._room.can_have(owner, left):
            raise NoRoom
        gone: list[StoredFile] = []
        try:
            while not self._room.shares.fits(left):
                freed = self._evict_some(owner, left, gone)
                if not self._room.shares.fits(left):
                    self._room.charge(owner, freed)
                    charged, left = charged + freed, left - freed
                    yield
        except BaseException:
            if charged:
                self._room.release(owner, charged)
            for file in gone:
                if file.id not in self._entries:
                    self._enter(file)
            raise
        self._room.charge(owner, left)
        return gone

    def _evict_some(self, owner: str, nbytes: int, gone: list[StoredFile]) -> int:
        """Let some files go; the bytes that they were charged."""
        freed = 0
        for victim in islice(self._room.victims(owner, nbytes), _EVICTIONS):
            gone.append(file := self._leave(victim))
            freed += charged_bytes(file.nbytes)
            if self._room.shares.fits(nbytes):
                break
        if not freed:
            raise NoRoom  # the rest is being written
        return freed

    def shrinking(self, owner: str, nbytes: int, now_s: float) -> Generator[None, None, list[StoredFile]]:
        """Charge a file for which the disk had no space, once its first charge is cancelled.

        The capacity falls to what is charged, less a margin, and files go as in `reserving`, until they have left as
        many bytes of the disk as the file needs. Raises `NoRoom` as that does, and then only the capacity has changed.
        """
        gone: list[StoredFile] = []
        freed = 0
        margin = min(self.nbytes // _MARGIN, charged_bytes(nbytes))
        try:
            while freed < min(charged_bytes(nbytes), _disk_bytes(nbytes)):
                if gone:
                    self.cancel(owner, nbytes)
                self._room.resize(min(self.capacity, self.nbytes + freed))
                try:
                    gone += yield from self.reserving(owner, charged_bytes(nbytes) + margin, now_s)
                except NoRoom:
                    if not margin:
                        raise
                    margin = 0  # the owner's share has room for the file alone
                    gone += yield from self.reserving(owner, charged_bytes(nbytes), now_s)
                self._room.release(owner, margin)
                self._room.resize(self.capacity - margin)
                margin, freed = 0, sum(_disk_bytes(file.nbytes) for file in gone)
        except BaseException:
            back = [file for file in gone if file.id not in self._entries]
            self._room.resize(max(self.capacity, self.nbytes + sum(charged_bytes(file.nbytes) for file in back)))
            for file in back:
                self._enter(file)
            raise
        return gone

    def grow(self, stored_bytes: int, free_bytes: int) -> None:
        """Let a capacity that was lowered rise to what fits on a disk that has so much, and so much free space."""
        if self.is_shrunk:
            fitting = stored_bytes + max(0, free_bytes - self.capacity // _GROWTH_MARGIN)
            self._room.resize(min(self._max_capacity, max(self.capacity, fitting)))

    def cancel(self, owner: str, nbytes: int) -> None:
        """Undo the reservation of a file that is not written after all."""
        self._room.release(owner, charged_bytes(nbytes))

    def commit(self, file: StoredFile) -> StoredFile | None:
        """Add a file that has been written. Returns the one whose place it takes, if any."""
        self.cancel(file.owner, file.nbytes)
        replaced = self._leave(file.id) if file.id in self._entries else None
        self._enter(file)
        return replaced

    def remove(self, owner: str, digest: Digest) -> StoredFile | None:
        """Remove a file that is gone. Returns it, if the index had it."""
        entry = self._entries.get(digest, _NOBODY_S)
        return None if entry.file.owner != owner else self._leave(digest)

    def expire(self, now_s: float, at_most: int = _SLICE) -> list[StoredFile]:
        """Remove some files that have expired, and return them."""
        gone = self._expiries[:at_most]
        return [self._leave(digest) for expires_s, digest in gone if expires_s <= now_s]

    def page(
        self, owner: str, now_s: float, *, limit: int, order: Order = "desc", purpose: str = "", after: Digest | None
    ) -> Page | None:
        """Return the files of an owner that come after another; None if it does not have that one."""
        ranks = self._ranks.get((owner, purpose), [])
        if after is None:
            place = 0 if order == "asc" else len(ranks)
        elif (last := self.get(owner, after, now_s)) is not None:
            rank = (last.created_s, after)
            place = bisect_right(ranks, rank) if order == "asc" else bisect_left(ranks, rank)
        else:
            return None
        files: list[StoredFile] = []
        step = range(place, len(ranks)) if order == "asc" else range(place - 1, -1, -1)
        for index in step:
            file = self._entries[ranks[index][1]].file
            if file.expires_s <= now_s:
                continue  # at most a slice of them, until the next call of `expire`
            if len(files) == limit:
                return Page(tuple(files), has_more=True)
            files.append(file)
        return Page(tuple(files))

    def listing(self) -> Listing:
        """Begin to compare the index with the objects that there are. Another comparison that goes on is void."""
        self._listing = Listing(self, self._serial)
        return self._listing

    def _enter(self, file: StoredFile) -> None:
        """There must be room for it."""
        self._serial += 1
        self._room.charge(file.owner, charged_bytes(file.nbytes))
        self._room.add(file.owner, file.id)
        self._entries[file.id] = _Entry(file, self._serial)
        for purpose in ("", file.purpose):
            insort(self._ranks.setdefault((file.owner, purpose), []), (file.created_s, file.id))
        insort(self._expiries, (file.expires_s, file.id))

    def _leave(self, digest: Digest) -> StoredFile:
        file = self._entries.pop(digest).file
        self._room.remove(file.owner, digest)
        self._room.release(file.owner, charged_bytes(file.nbytes))
        del self._expiries[bisect_left(self._expiries, (file.expires_s, digest))]
        for purpose in ("", file.purpose):
            ranks = self._ranks[file.owner, purpose]
            del ranks[bisect_left(ranks, (file.created_s, digest))]
            if not ranks:
                del self._ranks[file.owner, purpose]
        if self._listing is not None:
            self._listing.note_gone(file)
        return file


class Listing:
    """A comparison of an index with the objects that a store has. Made by `FileIndex.listing`.

    The objects are passed to `add`, as they are listed, then each slice of `finish` does some of the work. Files that
    were written since the beginning stay, and files that are gone since stay gone, whatever the listing says of them.
    """

    def __init__(self, index: FileIndex, serial: int) -> None:
        self._index = index
        self._serial = serial
        self.nbytes = 0
        """The charge of all files that were found."""
        self._found: dict[Digest, StoredFile] = {}
        self._gone: set[StoredFile] = set()
        self._oldest: list[_Rank] = []
        """A heap of what was found: files are entered in the order of their age, so that the oldest go first."""

    def add(self, files: Iterable[StoredFile]) -> list[StoredFile]:
        """Add files whose objects there are. Returns those whose objects another object of the same file replaces."""
        replaced: list[StoredFile] = []
        for file in files:
            other = self._found.get(file.id)
            if other is None:
                heappush(self._oldest, (file.created_s, file.id))
                self.nbytes += charged_bytes(file.nbytes)
            elif _order(other) >= _order(file):
                replaced.append(file)
                continue
            else:
                replaced.append(other)
            self._found[file.id] = file
        return replaced

    def finish(self, now_s: float) -> Iterator[list[StoredFile]]:
        """Bring the index up to the listing, slice by slice. Yields what has to be deleted for want of room."""
        index = self._index
        indexed = list(index._entries)
        for start in range(0, len(indexed), _SLICE):
            for digest in indexed[start : start + _SLICE]:
                entry = index._entries.get(digest)
                if entry is not None and entry.serial <= self._serial and digest not in self._found:
                    index._leave(digest)
            yield []
        while self._oldest:
            doomed: list[StoredFile] = []
            for _ in range(min(_SLICE, len(self._oldest))):
                doomed += self._adopt(self._found[heappop(self._oldest)[1]], now_s)
            yield doomed
        if index._listing is self:
            index._listing = None

    def note_gone(self, file: StoredFile) -> None:
        """Take note of a file that left the index meanwhile."""
        self._gone.add(file)

    def _adopt(self, file: StoredFile, now_s: float) -> list[StoredFile]:
        index = self._index
        entry = index._entries.get(file.id)
        if file in self._gone or (entry is not None and _order(entry.file) >= _order(file)):
            return []
        if entry is not None:
            index._leave(file.id)
        try:
            gone = index.reserve(file.owner, file.nbytes, now_s)
        except NoRoom:
            return [file]
        index.commit(file)
        return gone


def _disk_bytes(nbytes: int) -> int:
    """Return the bytes that a file of so many takes on a disk: whole blocks, and one for its folder."""
    return _BLOCK_BYTES * (1 - -nbytes // _BLOCK_BYTES)


def _order(file: StoredFile) -> tuple[int, int, str, str]:
    """Of two objects of one file, the higher counts: for every frontend the same."""
    return file.revision, file.expires_s, file.purpose, file.name
