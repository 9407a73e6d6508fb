"""Protocol of a store of bytes. Its implementations pass one contract suite.

Calls block and are made from threads. Every call has a deadline, in seconds of `time.monotonic`, and ends by it. All
failures are `StoreError`s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol

from semel.errors import SemelError

__all__ = ["BlobStore", "Chunk", "Chunks", "StoreDown", "StoreError", "StoreFull", "StoreLate"]

Chunk = Sequence[memoryview]
"""The memory of one value, in pieces that follow each other."""

Chunks = Literal["whole", "missing", "wrong_size"]


class StoreError(SemelError):
    """The store did not do what it was asked for."""


class StoreFull(StoreError):
    """The store takes no more bytes; it can be read from."""


class StoreDown(StoreError):
    """The store is not there, refuses us, or breaks the protocol."""


class StoreLate(StoreDown):
    """The store did not answer by the deadline."""


class BlobStore(Protocol):
    """Byte strings by key, in one node of the store."""

    def get_many(self, keys: Sequence[bytes], max_bytes: int, deadline: float) -> list[bytes | None]:
        """Get small values, in one round trip; None for a key that is not there.

        Of a value that is longer, a byte more than `max_bytes` is returned.
        """
        ...

    def get_into(
        self, keys: Sequence[bytes], chunks: Iterable[Chunk], received: Callable[[Chunk], None], deadline: float
    ) -> Chunks:
        """Read values straight into memory, and call `received` after each, in order.

        Each value must have exactly the size of its chunk. Unless the result is "whole", not all have come. Nothing is
        written after the call has ended.
        """
        ...

    def put(self, keys: Sequence[bytes], chunks: Iterable[Chunk], ttl_ms: int, deadline: float) -> None:
        """Store values. If this fails, some of them may be there. A chunk is taken when it is about to be sent."""
        ...

    def put_new(self, key: bytes, value: bytes, ttl_ms: int | None, deadline: float) -> bool:
        """Store a small value unless the key has one. Returns whether it was stored."""
        ...

    def delete(self, keys: Sequence[bytes], deadline: float) -> None:
        """Delete values; those that are not there are no error."""
        ...

    def ping(self, deadline: float) -> None:
        """Return if the store answers."""
        ...

    def close(self) -> None:
        """Close all connections. Calls under way fail."""
        ...
