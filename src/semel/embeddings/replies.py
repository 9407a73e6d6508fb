"""RESP2 as Redis and Valkey speak it, as far as we need it: commands as bytes, and a strict reader of replies. No I/O.

The other end may be hostile or broken: a line has a bound, only the reply that belongs to a command is taken,
and memory is only ever filled to the size that was expected. Everything else is `Malformed`, after which a connection
cannot be used any more. An error reply is a `Refusal`, after which it can.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

from semel.embeddings.protocol import Chunk, StoreDown, StoreError, StoreFull

__all__ = ["MAX_VALUE_BYTES", "Malformed", "Refusal", "Replies", "command", "put_command"]

MAX_VALUE_BYTES: Final = 512 << 20
"""The longest value that Redis has."""

_MAX_LINE_BYTES: Final = 512
_BUFFER_BYTES: Final = 4_096
_NUMBER: Final = re.compile(rb"-1|0|[1-9][0-9]{0,17}")
_CODE: Final = re.compile(r"[A-Z]{2,16}\b")
_ADVICE: Final = {
    "MOVED": "it is in cluster mode, which is not supported: name nodes that are not, separated by commas",
    "NOAUTH": "it wants a password: --embedding-store-password-file",
    "NOPERM": "the user may not do this: allow GET, SET, UNLINK, PING on ~semel:*",
    "WRONGPASS": "it does not know this user and password: --embedding-store-password-file",
}
_LOGIN_CODES: Final = frozenset({"ERR", "LOADING", *_ADVICE})
"""Those that say something about a login, and are no word of a password."""


class Malformed(StoreDown):
    """The store answered something that is no reply to what it was asked for."""


class Refusal(Exception):
    """An error reply."""

    def __init__(self, line: bytes) -> None:
        text = "".join(char if char.isprintable() else "?" for char in line.decode("latin-1"))
        super().__init__(text)
        self.code = found[0] if (found := _CODE.match(text)) else ""

    @property
    def is_wrong_type(self) -> bool:
        """True if the key has a list or the like instead of bytes."""
        return self.code == "WRONGTYPE"

    def error(self) -> StoreError:
        """Return the error as callers know it."""
        if self.code == "OOM":
            return StoreFull(
                "the embedding store is full: let it evict (maxmemory-policy allkeys-lru), or give it more"
            )
        return StoreDown(f"the embedding store says {str(self)[:120]!r}; {_ADVICE.get(self.code, 'see its log')}")

    def login_error(self) -> StoreDown:
        """Return the error of a refused password, without the store's text, which may repeat the password."""
        code = self.code if self.code in _LOGIN_CODES else "an error"
        advice = _ADVICE.get(self.code, "check the user and --embedding-store-password-file, and see its log")
        return StoreDown(f"the embedding store answers the login with {code}; {advice}")


class Replies:
    """A reader of replies. `receive` fills some of a buffer, at least one byte, and returns how many."""

    __slots__ = ("_begin", "_buffer", "_end", "_memory", "_receive")

    def __init__(self, receive: Callable[[memoryview], int]) -> None:
        self._receive = receive
        self._memory = bytearray(_BUFFER_BYTES)
        self._buffer = memoryview(self._memory)
        self._begin = self._end = 0

    @property
    def is_empty(self) -> bool:
        """True if nothing was received that has not been read."""
        return self._begin == self._end

    def simple(self, expected: bytes) -> None:
        """Read one word."""
        if (line := self._line()) != b"+" + expected:
            raise _malformed(line)

    def is_stored(self) -> bool:
        """Read the reply to a SET: False for nothing, which means that there is a value already."""
        if (line := self._line()) not in (b"+OK", b"$-1"):
            raise _malformed(line)
        return line == b"+OK"

    def count(self) -> int:
        """Read a number that is not negative."""
        line = self._line()
        if not line.startswith(b":") or (number := _number(line)) < 0:
            raise _malformed(line)
        return number

    def length(self) -> int | None:
        """Read the head of a value: its length, or None if there is none. `fill` or `skip`, and `end`, must follow."""
        line = self._line()
        if not line.startswith(b"$") or (number := _number(line)) > MAX_VALUE_BYTES:
            raise _malformed(line)
        return None if number < 0 else number

    def fill(self, target: memoryview) -> None:
        """Read bytes straight into memory, until it is full."""
        ready = min(self._end - self._begin, target.nbytes)
        target[:ready] = self._buffer[self._begin : self._begin + ready]
        self._begin += ready
        while ready < target.nbytes:
            ready += self._receive(target[ready:])

    def skip(self, nbytes: int) -> None:
        """Read bytes and drop them."""
        while nbytes:
            if self.is_empty:
                self._begin, self._end = 0, self._receive(self._buffer)
            step = min(nbytes, self._end - self._begin)
            self._begin += step
            nbytes -= step

    def end(self) -> None:
        """Read what ends a value."""
        mark = bytearray(2)
        self.fill(memoryview(mark))
        if mark != b"\r\n":
            raise Malformed("the embedding store sent a value that is longer than it said")

    def _line(self) -> bytes:
        """One line, without its end; an error reply is raised as such."""
        searched = self._begin
        while (at := self._memory.find(b"\r\n", searched, self._end)) < 0:
            size = self._end - self._begin
            if size > _MAX_LINE_BYTES:
                raise Malformed("the embedding store sent a line without an end")
            if self._begin:
                self._buffer[:size] = bytes(self._buffer[self._begin : self._end])
                self._begin, self._end = 0, size
            searched = max(0, size - 1)
            self._end += self._receive(self._buffer[size:])
        line = bytes(self._buffer[self._begin : at])
        self._begin = at + 2
        if len(line) > _MAX_LINE_BYTES:
            raise Malformed("the embedding store sent a line that is too long")
        if line.startswith(b"-"):
            raise Refusal(line[1:])
        return line


def command(*parts: bytes) -> bytes:
    """Return a command as it is sent."""
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)


def put_command(key: bytes, chunk: Chunk, ttl_ms: int) -> Iterator[bytes | memoryview]:
    """Yield the command that stores a value for a while, without a copy of the value."""
    head = command(b"SET", key, b"", b"PX", b"%d" % ttl_ms)
    before, _, after = head.partition(b"$0\r\n")
    yield before + b"$%d\r\n" % sum(piece.nbytes for piece in chunk)
    yield from chunk
    yield after


def _number(line: bytes) -> int:
    if not _NUMBER.fullmatch(line, 1):
        raise _malformed(line)
    return int(line[1:])


def _malformed(line: bytes) -> Malformed:
    return Malformed(f"the embedding store answered {line[:40]!r}, which is no answer to what it was asked for")
