"""A scope in which a request can be called back: its task is cancelled, and the scope raises why.

As `asyncio.timeout`, with a call in the place of the clock. A cancellation that comes from elsewhere goes on as one.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from semel.errors import ServiceError

__all__ = ["Revocation"]


class Revocation:
    """Calls back the task that enters it."""

    __slots__ = ("_cancelling", "_has_cancelled", "_is_over", "_loop", "_task", "error")

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._loop = asyncio.get_running_loop()
        self._task = task
        self._cancelling = task.cancelling()
        self.error: ServiceError | None = None
        """The reason for which the task was called back, if it was."""

        self._has_cancelled = False
        self._is_over = False

    def revoke(self, error: ServiceError) -> None:
        """Let the scope end with this error, soon. From any thread. The last of several errors counts."""
        self.error = error
        self._loop.call_soon_threadsafe(self._cancel)

    def withdraw(self, error: ServiceError) -> None:
        """Call nothing back because of this error, unless that has been done."""
        if self.error is error and not self._has_cancelled:
            self.error = None

    def _cancel(self) -> None:
        if not self._is_over and not self._has_cancelled and self.error is not None:
            self._has_cancelled = self._task.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over = True
        if not self._has_cancelled or self._task.uncancel() > self._cancelling:  # or somebody else cancelled it too
            return
        if error is None or isinstance(error, asyncio.CancelledError):
            assert self.error is not None
            raise self.error from None
