"""Staging: memory of one pool process, into which it writes what it has made.

Its pool copies from there into the segment of features, which no process that decodes can write (threats S23): a
decoder that is taken over cannot change a feature that was checked, nor one of another tenant. The copy is made as the
answer arrives, once, and everything is checked on the copy.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from typing import Final, Self

from semel.cache import Reservation
from semel.cache.shared.segment import Segment

__all__ = ["Staging"]

_BYTES: Final = 256 << 20
"""Room for the largest feature that a worker takes. Pages that were never written take no memory."""

_KEEP_BYTES: Final = 32 << 20
"""What stays with the process after an item: giving pages back and taking them again costs more than a copy."""

_INLINE_BYTES: Final = 1 << 20
"""A copy of so much takes less than a millisecond; more is copied in a thread, off the event loop."""


class Staging:
    """The pool's side of it."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._tenant: str | None = None  # whose feature was written last, if it may still be there

    @classmethod
    def create(cls) -> Self:
        """Staging that nobody has written to."""
        return cls(Segment(_BYTES))

    def fileno(self) -> int:
        """Return the descriptor, for the process that writes."""
        return self._segment.fileno()

    def has_room(self, nbytes: int) -> bool:
        """Return whether a feature of this size can be staged."""
        return nbytes <= self._segment.size

    async def copy_to(self, room: Reservation, nbytes: int, feature_segment: Segment, threads: Executor) -> None:
        """Copy what was staged into a range of the segment of features; if it is large, in one of these threads.

        They must be the pool's own. The event loop's default threads may all wait for a free process: with them, the
        process would wait for the threads and the threads for the process.
        """
        view = room.view()[: min(nbytes, room.nbytes)]  # holds on to the range, whatever becomes of the reservation
        end = room.offset + view.nbytes
        if view.nbytes <= _INLINE_BYTES:
            self._copy(view, feature_segment, end)
        else:
            await asyncio.get_running_loop().run_in_executor(threads, self._copy, view, feature_segment, end)

    def expect(self, tenant: str) -> None:
        """Expect the process to write a feature of this tenant."""
        self._tenant = tenant

    async def forget_others(self, tenant: str, threads: Executor) -> None:
        """Forget what was staged for another tenant, before the process works for this one (threats S23).

        Giving back the pages of a large feature takes milliseconds, so a thread does it.
        """
        if self._tenant not in (None, tenant):
            await asyncio.get_running_loop().run_in_executor(threads, self.forget)

    def forget(self) -> None:
        """Give back the memory of what was staged, which was copied by now."""
        self._tenant = None
        self._segment.forget(self._segment.size)

    def close(self) -> None:
        """Give the memory back."""
        self._segment.close()

    def _copy(self, view: memoryview, feature_segment: Segment, end: int) -> None:
        feature_segment.populate(end)
        self._segment.read_into(view)
        if view.nbytes > _KEEP_BYTES:
            self._segment.forget(view.nbytes)
