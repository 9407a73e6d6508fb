"""A `BlobStore` in memory, for tests: it can fail in ways in which a real Redis cannot be made to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from semel.embeddings.protocol import Chunk, Chunks, StoreDown, StoreFull, StoreLate

__all__ = ["MemoryBlobs"]

Operation = Literal["get_many", "get_into", "put", "put_new", "delete", "ping"]


class MemoryBlobs:
    """Byte strings by key. Any thread may use it.

    A fault stays until it is taken back: set the attributes, also while calls are under way.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.values: dict[bytes, tuple[bytes, float]] = {}
        """Each with when it expires."""
        self.capacity_bytes: int | None = None
        """With more it is full."""
        self.is_down = False
        self.delay_s: float = 0.0
        """How long each call takes; what passes its deadline ends there."""
        self.corrupt: Callable[[bytes, bytes], bytes] | None = None
        """Changes what is read: is called with a key and its value."""
        self.lose: Callable[[bytes], bool] | None = None
        """Says which keys are not found, though they were stored."""
        self.calls: list[Operation] = []
        self._clock = clock
        self._lock = threading.Lock()
        self._is_closed = threading.Event()

    @property
    def nbytes(self) -> int:
        """The size of all values."""
        return sum(len(value) for value, _ in self.values.values())

    def get_many(self, keys: Sequence[bytes], max_bytes: int, deadline: float) -> list[bytes | None]:
        """Small values."""
        self._begin("get_many", deadline)
        found = [self._value(key) for key in keys]
        return [None if value is None else value[: max_bytes + 1] for value in found]

    def get_into(
        self, keys: Sequence[bytes], chunks: Iterable[Chunk], received: Callable[[Chunk], None], deadline: float
    ) -> Chunks:
        """Values into memory."""
        self._begin("get_into", deadline)
        for key, chunk in zip(keys, chunks, strict=True):
            if (value := self._value(key)) is None:
                return "missing"
            if len(value) != sum(piece.nbytes for piece in chunk):
                return "wrong_size"
            for piece in chunk:
                piece[:], value = value[: piece.nbytes], value[piece.nbytes :]
            received(chunk)
        return "whole"

    def put(self, keys: Sequence[bytes], chunks: Iterable[Chunk], ttl_ms: int, deadline: float) -> None:
        """Store values."""
        self._begin("put", deadline)
        for key, chunk in zip(keys, chunks, strict=True):
            self._store(key, b"".join(chunk), ttl_ms)

    def put_new(self, key: bytes, value: bytes, ttl_ms: int | None, deadline: float) -> bool:
        """Store a value unless there is one."""
        self._begin("put_new", deadline)
        with self._lock:
            if self._value(key) is not None:
                return False
            self._store(key, value, ttl_ms)
            return True

    def delete(self, keys: Sequence[bytes], deadline: float) -> None:
        """Delete values."""
        self._begin("delete", deadline)
        for key in keys:
            self.values.pop(key, None)

    def ping(self, deadline: float) -> None:
        """Return if it is up."""
        self._begin("ping", deadline)

    def close(self) -> None:
        """From now on it is down."""
        self.is_down = True
        self._is_closed.set()

    def set_raw(self, values: Mapping[bytes, bytes]) -> None:
        """Plant values, as somebody else would who can write to the store."""
        for key, value in values.items():
            self.values[key] = (value, float("inf"))

    def _begin(self, operation: Operation, deadline: float) -> None:
        self.calls.append(operation)
        if self.delay_s:
            self._is_closed.wait(max(0.0, min(self.delay_s, deadline - time.monotonic())))
        if time.monotonic() >= deadline:
            raise StoreLate("this store was set to be late")
        if self.is_down:
            raise StoreDown("this store was set to be down")

    def _value(self, key: bytes) -> bytes | None:
        value, expires = self.values.get(key, (b"", 0.0))
        if expires <= self._clock() or (self.lose is not None and self.lose(key)):
            return None
        return value if self.corrupt is None else self.corrupt(key, value)

    def _store(self, key: bytes, value: bytes, ttl_ms: int | None) -> None:
        if self.capacity_bytes is not None and self.nbytes + len(value) > self.capacity_bytes:
            raise StoreFull("this store was set to be full")
        self.values[key] = (value, float("inf") if ttl_ms is None else self._clock() + ttl_ms / 1_000)
