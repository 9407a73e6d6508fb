"""A slow and obviously right model of the index of a media store, and drawn files."""

from __future__ import annotations

from dataclasses import dataclass, field

from semel.core import Digest
from semel.store.file import StoredFile
from semel.store.index import SMALLEST_BYTES, NoRoom, Order, Page

OWNERS = ("a" * 16 + "-" + "1" * 32, "a" * 16 + "-" + "2" * 32, "b" * 16 + "-" + "3" * 32)


def digest_of(owner: int, content: int) -> Digest:
    return Digest(bytes([owner, content]) * 16)


def file_from(
    owner: int, content: int, *, nbytes: int = 10, created_s: int = 0, expires_s: int = 1_000, revision: int = 1
) -> StoredFile:
    purpose = ("vision", "user_data")[content % 2]
    return StoredFile(
        digest_of(owner, content),
        OWNERS[owner],
        nbytes,
        revision,
        created_s,
        expires_s,
        None,
        purpose,
        f"{content}.png",
    )


def charge(nbytes: int) -> int:
    return max(SMALLEST_BYTES, nbytes)


@dataclass
class Model:
    """Every decision is made by looking at everything."""

    capacity: int
    idle_s: float
    files: dict[Digest, StoredFile] = field(default_factory=dict)
    """Least recently used first."""

    pending: list[tuple[str, int]] = field(default_factory=list)
    used_s: dict[str, float] = field(default_factory=dict)
    """When an owner has used the store; only of those that have something in it."""

    def nbytes_of(self, owner: str) -> int:
        written = [charge(file.nbytes) for file in self.files.values() if file.owner == owner]
        return sum(written) + sum(charge(nbytes) for one, nbytes in self.pending if one == owner)

    @property
    def nbytes(self) -> int:
        return sum(self.nbytes_of(owner) for owner in OWNERS)

    def owners(self) -> list[str]:
        return [owner for owner in OWNERS if self.nbytes_of(owner)]

    def share(self, owner: str) -> int:
        return self.capacity // len({*self.owners(), owner})

    def touch(self, owner: str, now_s: float) -> None:
        self.used_s[owner] = now_s

    def get(self, owner: str, digest: Digest, now_s: float) -> StoredFile | None:
        file = self.files.get(digest)
        if file is None or file.owner != owner or file.expires_s <= now_s:
            return None
        self.files[digest] = self.files.pop(digest)
        self.touch(owner, now_s)
        return file

    def oldest_of(self, owner: str) -> StoredFile | None:
        return next((file for file in self.files.values() if file.owner == owner), None)

    def victim(self, owner: str, nbytes: int, now_s: float) -> StoredFile | None:
        """Whose file goes: an idle owner's, else that of whoever has the most and too much, else its own."""
        others = [other for other in self.owners() if other != owner]
        idle = [one for one, at_s in self.used_s.items() if one in others and at_s < now_s - self.idle_s]
        if idle := [other for other in idle if self.oldest_of(other)]:
            return self.oldest_of(min(idle, key=self.used_s.__getitem__))
        limit = max(self.nbytes_of(owner) + nbytes, self.share(owner))
        large = [other for other in others if self.nbytes_of(other) > limit and self.oldest_of(other)]
        if large:
            return self.oldest_of(max(large, key=lambda other: (self.nbytes_of(other), -OWNERS.index(other))))
        return self.oldest_of(owner)

    def reserve(self, owner: str, size: int, now_s: float) -> set[Digest]:
        nbytes, before = charge(size), dict(self.files)
        if self.nbytes + nbytes > self.capacity:
            active = [o for o in self.owners() if o != owner and self.used_s[o] >= now_s - self.idle_s]
            needed = nbytes + sum(min(self.nbytes_of(other), nbytes) for other in active)
            if nbytes > self.share(owner) and needed > self.capacity:
                raise NoRoom
        gone: set[Digest] = set()
        while self.nbytes + nbytes > self.capacity:
            victim = self.victim(owner, nbytes, now_s)
            if victim is None:
                self.files = before
                raise NoRoom  # the order of use is lost, which the machine avoids
            self.leave(victim.id)
            gone.add(victim.id)
        self.pending.append((owner, size))
        self.touch(owner, now_s)
        return gone

    def leave(self, digest: Digest) -> StoredFile | None:
        file = self.files.pop(digest, None)
        self.forget_owners()
        return file

    def forget_owners(self) -> None:
        self.used_s = {owner: at_s for owner, at_s in self.used_s.items() if self.nbytes_of(owner)}

    def cancel(self, owner: str, size: int) -> None:
        self.pending.remove((owner, size))
        self.forget_owners()

    def commit(self, file: StoredFile, now_s: float) -> StoredFile | None:
        self.cancel(file.owner, file.nbytes)
        replaced = self.leave(file.id)
        self.files[file.id] = file
        self.touch(file.owner, now_s)
        return replaced

    def expire(self, now_s: float) -> set[Digest]:
        gone = {digest for digest, file in self.files.items() if file.expires_s <= now_s}
        for digest in gone:
            self.leave(digest)
        return gone

    def page(
        self, owner: str, now_s: float, *, limit: int, order: Order, purpose: str, after: Digest | None
    ) -> Page | None:
        mine = [file for file in self.files.values() if file.owner == owner and file.expires_s > now_s]
        mine.sort(key=lambda file: (file.created_s, file.id), reverse=order == "desc")
        if after is not None:
            if self.get(owner, after, now_s) is None:
                return None
            mine = mine[[file.id for file in mine].index(after) + 1 :]
        found = [file for file in mine if purpose in ("", file.purpose)]
        return Page(tuple(found[:limit]), has_more=len(found) > limit)
