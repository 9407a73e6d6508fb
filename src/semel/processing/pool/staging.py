"""Staging: memory of one pool process, into which it writes what it has made.

Its pool copies from there into the segment of features, which no process that decodes can write (threats S23): a
decoder that is taken over cannot change a feature that was checked, nor one of another tenant. The copy is made as the
answer arrives, once, and everything is checked on the copy.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final, Self

from semel.cache.shared.segment import Segment

__all__ = ["Staging"]

_BYTES: Final = 256 << 20
"""Room for the largest feature that a worker takes. Pages that were never written take no memory."""

_KEEP_BYTES: Final = 32 << 20
"""What stays with the process after an item: giving pages back and taking them again costs more than a copy."""

_BLOCK_BYTES: Final = 512  # of `st_blocks`, on every file system

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

    @property
    def size(self) -> int:
        """The bytes of the largest feature that can be staged."""
        return self._segment.size

    async def copy_to(self, view: memoryview, threads: Executor, prepare: Callable[[], object] | None = None) -> None:
        """Fill a view with what was staged, once `prepare` has been called; if it is large, in one of these threads.

        They must be the pool's own. The event loop's default threads may all wait for a free process: with them, the
        process would wait for the threads and the threads for the process.
        """
        if view.nbytes <= _INLINE_BYTES:
            self._copy(view, prepare)
        else:
            await asyncio.get_running_loop().run_in_executor(threads, self._copy, view, prepare)

    def expect(self, tenant: str) -> None:
        """Expect the process to write a feature of this tenant."""
        self._tenant = tenant

    async def forget_others(self, tenant: str, threads: Executor) -> None:
        """Forget what was staged for another tenant, before the process works for this one (threats S23).

        Giving back the pages of a large feature takes milliseconds, so a thread does it.
        """
        if self._tenant not in (None, tenant):
            await asyncio.get_running_loop().run_in_executor(threads, self.forget)

    async def trim(self, threads: Executor) -> None:
        """Give back the memory of what was staged, which was copied or refused by now, if it is large.

        How much there is, the kernel says: the process may have written more than it tells, or have failed since.
        """
        if os.fstat(self.fileno()).st_blocks * _BLOCK_BYTES > _KEEP_BYTES:
            await asyncio.get_running_loop().run_in_executor(threads, self.forget)

    def forget(self) -> None:
        """Give back the memory of what was staged, which was copied by now."""
        self._tenant = None
        self._segment.forget(self._segment.size)

    def close(self) -> None:
        """Give the memory back."""
        self._segment.close()

    def _copy(self, view: memoryview, prepare: Callable[[], object] | None) -> None:
        if prepare is not None:
            prepare()
        self._segment.read_into(view)
