"""A limit on bytes with a share for each key, independent of the number of other keys (threats S18).

Callers that wait for the same key are served in order. A key that has nothing may take any number at once: what is
larger than the limit has to be alone. It belongs to one event loop and does no I/O.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

__all__ = ["KeyedByteLimit"]


@dataclass(slots=True, eq=False)
class _Line:
    """The bytes of one key, and who waits for more."""

    nbytes: int = 0
    waiting: dict[asyncio.Future[None], int] = field(default_factory=dict)


class KeyedByteLimit:
    """A limited number of bytes at a time for each key."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lines: dict[str, _Line] = {}

    def __getitem__(self, key: str) -> int:
        """The bytes that a key has."""
        line = self._lines.get(key)
        return 0 if line is None else line.nbytes

    def __len__(self) -> int:
        """Number of keys that have bytes or wait for some."""
        return len(self._lines)

    async def take(self, key: str, nbytes: int) -> None:
        """Wait for so many bytes. The caller must release them."""
        if not nbytes:
            return
        turn = asyncio.get_running_loop().create_future()
        line = self._lines.setdefault(key, _Line())
        line.waiting[turn] = nbytes
        self._serve(key, line)
        try:
            await turn
        except BaseException:
            if line.waiting.pop(turn, None) is None:  # they were its own already
                self.release(key, nbytes)
            else:
                self._serve(key, line)
            raise

    def release(self, key: str, nbytes: int) -> None:
        """A key has so many bytes less."""
        if nbytes:
            line = self._lines[key]
            line.nbytes -= nbytes
            self._serve(key, line)

    def _serve(self, key: str, line: _Line) -> None:
        while line.waiting:
            turn, nbytes = next(iter(line.waiting.items()))
            if line.nbytes and line.nbytes + nbytes > self._max_bytes:
                return
            del line.waiting[turn]
            line.nbytes += nbytes
            if not turn.cancelled():
                turn.set_result(None)
        if not line.nbytes:
            del self._lines[key]

    def __repr__(self) -> str:
        return f"KeyedByteLimit({len(self):,} keys of {self._max_bytes:,} bytes)"
