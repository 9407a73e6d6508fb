"""The adapters of a fleet: which workers have one, and what all of them are to have.

An operator asks one worker to load or unload an adapter. Its frontends remember that, and pass it on to every worker
that has not done it, also to those that come later. A request goes to the workers that have the weights of the last
change: from the moment a frontend hears of it no other worker answers with those of before.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from semel.core import Adapter, LatestChanges
from semel.fleet.worker import RemoteWorker

__all__ = ["FleetAdapters"]

logger = logging.getLogger(__name__)


class FleetAdapters:
    """The adapters of the workers that serve. What operators asked for is remembered when none of them has it."""

    def __init__(self) -> None:
        self.by_name: Mapping[str, Adapter] = {}
        """Those that a worker has, or is to have."""

        self._holders: Mapping[str, int] = {}
        self._changes = LatestChanges()
        self._noted: Mapping[RemoteWorker, object] = {}  # the announcement of each worker that was taken in
        self._followed: Mapping[RemoteWorker, object] = {}  # the session in which each got all changes until now

    def holders(self, name: str) -> int:
        """Return the set of the workers that answer for an adapter."""
        return self._holders.get(name, 0)

    def review(self, serving: Mapping[RemoteWorker, int]) -> None:
        """Take note of what the workers that serve, given with their numbers, have now, and pass changes on."""
        new = [
            change
            for worker in serving
            if worker.adapter_changes is not self._noted.get(worker)
            for change in worker.adapter_changes
            if self._changes.note(change)
        ]
        self._noted = {worker: worker.adapter_changes for worker in serving}
        for worker in serving:
            worker.follow(new if self._followed.get(worker) is worker.adapter_session else self._changes)
        self._followed = {worker: worker.adapter_session for worker in serving}
        self._holders, self.by_name = self._find(serving)

    def _find(self, serving: Mapping[RemoteWorker, int]) -> tuple[dict[str, int], dict[str, Adapter]]:
        """Return who answers for each adapter, and all that somebody has or is to have."""
        holders: dict[str, int] = {}
        by_name: dict[str, Adapter] = {}
        for worker, number in serving.items():
            for adapter in worker.adapters:
                if (last := self._changes.get(adapter.name)) is not None and last.content != adapter.content:
                    continue  # it was unloaded, or has other weights since
                if by_name.setdefault(adapter.name, adapter).content != adapter.content:
                    logger.warning("the worker at %s has other weights for the adapter %r", worker.name, adapter.name)
                holders[adapter.name] = holders.get(adapter.name, 0) | 1 << number
        if (taking := next((worker for worker in serving if worker.adapter_session is not None), None)) is not None:
            for wanted in self._changes:
                if wanted.content and wanted.name not in by_name:
                    model = taking.contract.model
                    by_name[wanted.name] = Adapter(wanted.name, wanted.root, wanted.content, model)
        return holders, by_name
