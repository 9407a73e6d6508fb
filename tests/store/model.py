"""A slow and obviously right model of the index of a media store, and drawn files."""

from __future__ import annotations

from dataclasses import dataclass

from semel.core import Digest
from semel.store.index import SMALLEST_BYTES, NoRoom, Order, Page
from semel.store.names import StoredFile
from tests.fairness.model import Model as Room
from tests.fairness.model import Piece

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


@dataclass(eq=False)
class Held(Piece):
    """What an owner is charged: a file, or one that is being written."""

    file: StoredFile | None = None


class Model:
    """Every decision is made by looking at everything: whose files go is the model of all that tenants share."""

    def __init__(self, capacity: int, idle_s: float) -> None:
        self.room = Room(capacity, idle_s)

    @property
    def held(self) -> dict[Digest, Held]:
        pieces = [piece for piece in self.room.pieces if isinstance(piece, Held)]
        return {piece.file.id: piece for piece in pieces if piece.file is not None}

    @property
    def files(self) -> dict[Digest, StoredFile]:
        """Least recently used first."""
        return {digest: piece.file for digest, piece in self.held.items() if piece.file is not None}

    def nbytes_of(self, owner: str) -> int:
        return self.room.amounts()[owner]

    def put(self, file: StoredFile) -> None:
        self.room.put(Held(file.owner, charge(file.nbytes), file=file))

    def get(self, owner: str, digest: Digest, now_s: float) -> StoredFile | None:
        self.room.now_s = now_s
        piece = self.held.get(digest)
        if piece is None or piece.file is None or piece.tenant != owner or piece.file.expires_s <= now_s:
            return None
        self.room.use(piece)
        return piece.file

    def reserve(self, owner: str, size: int, now_s: float) -> set[Digest]:
        self.room.now_s = now_s
        room, nbytes, gone = self.room, charge(size), set(self.files)
        if not room.fits(nbytes) and not room.can_have(owner, nbytes):
            raise NoRoom
        while not room.fits(nbytes):
            room.drop(min(room.victims(owner, nbytes), key=lambda piece: piece.tenant))
        room.put(Held(owner, nbytes, can_go=False))
        return gone - set(self.files)

    def leave(self, digest: Digest) -> StoredFile | None:
        piece = self.held.get(digest)
        if piece is not None:
            self.room.drop(piece)
        return None if piece is None else piece.file

    def cancel(self, owner: str, size: int) -> None:
        pending = [piece for piece in self.room.pieces if not piece.can_go]
        self.room.drop(next(one for one in pending if (one.tenant, one.amount) == (owner, charge(size))))

    def commit(self, file: StoredFile) -> StoredFile | None:
        self.cancel(file.owner, file.nbytes)
        replaced = self.leave(file.id)
        self.put(file)
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
