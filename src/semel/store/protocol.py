"""Protocol of a media store. Its implementations pass one contract suite."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final, Protocol

from semel.core import Digest
from semel.store.file import StoredFile
from semel.store.index import Order, Page

__all__ = ["FRONTEND", "MediaStore", "Payer", "Pin", "Spend", "Upload", "no_pin"]

Spend = Callable[[int], None]
"""Is called with the number of bytes before they are read, and raises if they are not allowed."""

Pin = Callable[[int], Callable[[], None]]
"""Is called with the number of bytes when an operation begins that holds them and that nobody can stop. What it returns
is called when that has ended, also if nobody waits for it."""


def no_pin(_: int) -> Callable[[], None]:
    """Do nothing, for bytes that are charged to nobody."""
    return _unpin_nothing


def _unpin_nothing() -> None:
    return


@dataclass(frozen=True, slots=True)
class Payer:
    """For whom an operation of a store is: its bound is theirs, and so are its bytes."""

    owner: str = ""
    """The tenant's name in the store; empty for the frontend itself."""

    pin: Pin = no_pin


FRONTEND: Final = Payer()


@dataclass(frozen=True, slots=True)
class Upload:
    """A file that a client sends."""

    data: bytes | bytearray
    """Nobody changes it any more."""

    content: bytes
    """The blake3 hash of its bytes."""

    name: str
    purpose: str
    ttl_s: int | None = None
    """Seconds for which it is kept, if not the store's own."""


class MediaStore(Protocol):
    """Files of tenants, by content.

    A tenant sees its own files only: whether another has a file changes neither an answer nor the work for it (threats
    S12). Every call raises `MediaStoreUnavailable` if the store does not answer in time, and then has changed nothing
    that a caller could see. A file is there completely or not at all, also after a process was killed. What one tenant
    has left undone in a slow store is refused to that tenant alone (S18).
    """

    async def put(self, tenant: str, upload: Upload, pin: Pin = no_pin) -> StoredFile:
        """Store a file. The same bytes of a tenant are the same file, whose name, purpose and expiry are renewed.

        Raises `MediaTooLarge` if the tenant cannot have so much.
        """
        ...

    async def find(self, tenant: str, digest: Digest) -> StoredFile | None:
        """Return a file of a tenant, without its bytes; None if it has none of this id."""
        ...

    async def locate(self, tenant: str, digest: Digest) -> StoredFile | None:
        """Find a file, without a look for one that this process has seen before, even if the store is gone.

        So what another process has deleted may be found for a minute.
        """
        ...

    async def read(
        self, tenant: str, digest: Digest, spend: Spend, pin: Pin = no_pin
    ) -> tuple[StoredFile, memoryview] | None:
        """Return a file of a tenant with its bytes, which are those that were stored, or it is none."""
        ...

    async def stream(
        self, tenant: str, digest: Digest, spend: Spend, pin: Pin = no_pin
    ) -> tuple[StoredFile, AsyncIterator[memoryview]] | None:
        """Return a file of a tenant with its bytes in pieces of 1 MiB, one of which is in memory and charged at a time.

        The iterator raises `MediaStoreUnavailable` instead of its last piece if the bytes are not those of the upload.
        """
        ...

    async def delete(self, tenant: str, digest: Digest) -> bool:
        """Delete a file of a tenant. Returns whether there was one."""
        ...

    async def page(
        self, tenant: str, *, limit: int, order: Order = "desc", purpose: str = "", after: Digest | None = None
    ) -> Page | None:
        """List files of a tenant by the time of their upload; None if it lacks the one that they are to follow."""
        ...
