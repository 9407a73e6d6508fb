"""What operators asked other workers for, done at this one: one change after another, and each is tried once."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from semel.core import AdapterChange, LatestChanges
from semel.engine import EngineAdapters
from semel.errors import ProtocolError, SemelError

__all__ = ["AdapterChanges"]

_MAX_WAITING: Final = 1_024
_MAX_AHEAD_US: Final = 3_600_000_000
"""The most that the clock of another host may be ahead: an operator's next change has to be later than the last one."""

logger = logging.getLogger(__name__)
_audit_log = logging.getLogger("semel.audit")


class AdapterChanges:
    """The changes that frontends have passed on, most of them several times."""

    def __init__(self, adapters: EngineAdapters) -> None:
        self._adapters = adapters
        self._tried = LatestChanges()
        self._waiting: dict[str, AdapterChange] = {}
        self._task: asyncio.Task[None] | None = None

    def take(self, change: AdapterChange) -> None:
        """Follow a change in its turn, unless it was tried, or there is a later one."""
        if change.time_us > time.time_ns() // 1_000 + _MAX_AHEAD_US:
            raise ProtocolError("a change of an adapter is of a time that is far from here")
        if change.name not in self._waiting and len(self._waiting) >= _MAX_WAITING:
            raise ProtocolError(f"over {_MAX_WAITING} adapters wait to be changed")
        if not self._tried.note(change):
            return
        self._waiting[change.name] = change
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._follow())

    def stop(self) -> None:
        """Follow nothing more."""
        if self._task is not None:
            self._task.cancel()

    async def _follow(self) -> None:
        while self._waiting:
            change = self._waiting.pop(next(iter(self._waiting)))
            action = "load" if change.content else "unload"
            _audit_log.info("%s the adapter %r, as at another worker: a frontend passes it on", action, change.name)
            try:
                await self._adapters.follow(change)
            except SemelError as error:
                logger.error(  # noqa: TRY400 - it says all
                    "the adapter %r was loaded at another worker and cannot be here: %s; load it at this one, or again",
                    change.name,
                    error,
                )
            except Exception:  # the edge of a task: the next one may do
                logger.exception("the adapter %r cannot be changed", change.name)
