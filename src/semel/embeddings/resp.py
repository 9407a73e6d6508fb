"""A node of the store that speaks RESP: Valkey, Redis, and what is like them.

A client of our own, because the usual ones copy each value two or three times and hold the interpreter while they do:
an image of 9.8 MB takes them three to ten times the CPU time (docs/internals/embedding-store.md). Values go straight
between the socket and the given memory.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final

from semel.embeddings.address import StoreAddress
from semel.embeddings.connection import Pool, connect
from semel.embeddings.protocol import Chunk, Chunks
from semel.embeddings.replies import Refusal, Replies, command, put_command

__all__ = ["RespStore"]

_CONNECTIONS: Final = 5
"""As many as a worker has threads for the store: a call that waits for another one of this worker would be late."""

_SMALL_WINDOW: Final = 256
_WINDOW: Final = 8
"""Chunks that are asked for ahead: more would only pile up in the store's memory."""

_MAX_SKIPPED_BYTES: Final = 1 << 20


class _WrongSize(Exception):
    """A value has another size than was expected, and was not read."""


class RespStore:
    """A `BlobStore` over the RESP protocol."""

    def __init__(
        self, address: StoreAddress, *, tls: ssl.SSLContext | None = None, password: str | None = None
    ) -> None:
        self.address = address
        self._pool = Pool(partial(connect, address, tls, password), _CONNECTIONS)

    def __repr__(self) -> str:
        return f"RespStore({self.address.name})"

    def get_many(self, keys: Sequence[bytes], max_bytes: int, deadline: float) -> list[bytes | None]:
        """Get small values, in one round trip."""
        values: list[bytes | None] = []
        commands = ([command(b"GET", key)] for key in keys)
        try:
            with self._pool.connection(deadline) as connection:
                replies = connection.replies
                read = partial(_read_small, replies, max_bytes, values)
                connection.exchange(commands, read, window=_SMALL_WINDOW, deadline=deadline)
        except _WrongSize:
            pass
        return values + [None] * (len(keys) - len(values))

    def get_into(
        self, keys: Sequence[bytes], chunks: Iterable[Chunk], received: Callable[[Chunk], None], deadline: float
    ) -> Chunks:
        """Read values straight into memory."""
        missing: list[int] = []
        targets = iter(chunks)
        try:
            with self._pool.connection(deadline) as connection:
                replies = connection.replies

                def read() -> None:
                    chunk = next(targets)
                    if not _read_chunk(replies, chunk):
                        missing.append(1)
                    elif not missing:
                        received(chunk)

                commands = _until(missing, ([command(b"GET", key)] for key in keys))
                connection.exchange(commands, read, window=_WINDOW, deadline=deadline)
        except _WrongSize:
            return "wrong_size"
        return "missing" if missing else "whole"

    def put(self, keys: Sequence[bytes], chunks: Iterable[Chunk], ttl_ms: int, deadline: float) -> None:
        """Store values for a while."""
        commands = (put_command(key, chunk, ttl_ms) for key, chunk in zip(keys, chunks, strict=True))
        with self._pool.connection(deadline) as connection:
            read = partial(connection.replies.simple, b"OK")
            connection.exchange(commands, read, window=_WINDOW, deadline=deadline)

    def put_new(self, key: bytes, value: bytes, ttl_ms: int | None, deadline: float) -> bool:
        """Store a small value unless there is one."""
        ttl = () if ttl_ms is None else (b"PX", b"%d" % ttl_ms)
        results: list[bool] = []
        with self._pool.connection(deadline) as connection:
            replies = connection.replies
            put = command(b"SET", key, value, b"NX", *ttl)
            connection.exchange([[put]], lambda: results.append(replies.is_stored()), window=1, deadline=deadline)
        return results[0]

    def delete(self, keys: Sequence[bytes], deadline: float) -> None:
        """Delete values."""
        if not keys:
            return
        with self._pool.connection(deadline) as connection:
            delete = command(b"UNLINK", *keys)
            connection.exchange([[delete]], connection.replies.count, window=1, deadline=deadline)

    def ping(self, deadline: float) -> None:
        """Return if the store answers."""
        with self._pool.connection(deadline) as connection:
            read = partial(connection.replies.simple, b"PONG")
            connection.exchange([[command(b"PING")]], read, window=1, deadline=deadline)

    def close(self) -> None:
        """Close all connections."""
        self._pool.close()


def _read_small(replies: Replies, max_bytes: int, values: list[bytes | None]) -> None:
    try:
        length = replies.length()
    except Refusal as refusal:
        if not refusal.is_wrong_type:
            raise
        values.append(b"")  # something is there, and it is none of ours
        return
    if length is None:
        values.append(None)
        return
    value = bytearray(min(length, max_bytes + 1))
    replies.fill(memoryview(value))
    values.append(bytes(value))
    if (rest := length - len(value)) > _MAX_SKIPPED_BYTES:
        raise _WrongSize
    replies.skip(rest)
    replies.end()


def _read_chunk(replies: Replies, chunk: Chunk) -> bool:
    """Read a value into its memory. Returns whether there is one."""
    try:
        length = replies.length()
    except Refusal as refusal:
        raise _WrongSize if refusal.is_wrong_type else refusal from refusal
    if length is None:
        return False
    if length != sum(piece.nbytes for piece in chunk):
        raise _WrongSize
    for piece in chunk:
        replies.fill(piece)
    replies.end()
    return True


def _until(stop: Sequence[object], commands: Iterable[list[bytes]]) -> Iterator[list[bytes]]:
    """Yield the commands, until there is a reason to stop."""
    for one in commands:
        if stop:
            return
        yield one
