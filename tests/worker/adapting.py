"""An engine whose adapters have no weights: a file's content is what its path stands for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from semel.core import Adapter, AdapterChange, Contract, LatestChanges
from semel.errors import ModelNotFound
from semel.lab.testing.engine import EchoEngine

__all__ = ["LOADED", "NOWHERE", "AdaptingEngine"]

LOADED = Adapter("sql", "/adapters/sql", "of /adapters/sql", "tiny")
NOWHERE = "/nowhere"


class AdaptingEngine(EchoEngine):
    """It has one from its command line."""

    def __init__(self, contract: Contract) -> None:
        super().__init__(replace(contract, adapters=(LOADED,)))
        self.watchers: list[Callable[[], None]] = []
        self.changes = LatestChanges()
        self.lacks: set[str] = set()
        self.followed: list[AdapterChange] = []

    async def load(self, name: str, path: str, *, in_place: bool = False, is_3d_weight: bool = False) -> None:
        assert not is_3d_weight
        if path == NOWHERE:
            raise ModelNotFound.of("lora_path", f"there is no adapter at {path}")
        assert in_place or name not in self.contents
        self._put(AdapterChange(name, self._now(name), path, f"of {path}"))

    async def unload(self, name: str) -> None:
        self._put(AdapterChange(name, self._now(name)))

    async def follow(self, change: AdapterChange) -> None:
        self.followed.append(change)
        if change.root in self.lacks:
            raise ModelNotFound.of("lora_path", f"there is no folder {change.root}")
        if self.changes.is_new(change):
            self._put(change)

    @property
    def contents(self) -> dict[str, str]:
        assert isinstance(self.contract.adapters, tuple)
        return {one.name: one.content for one in self.contract.adapters}

    def _put(self, change: AdapterChange) -> None:
        assert isinstance(self.contract.adapters, tuple)
        others = tuple(one for one in self.contract.adapters if one.name != change.name)
        loaded = (Adapter(change.name, change.root, change.content, "tiny"),) if change.content else ()
        self.contract = replace(self.contract, adapters=(*others, *loaded))
        self.changes.note(change)
        for watcher in self.watchers:
            watcher()

    def _now(self, name: str) -> int:
        return self.changes.next_time_us(name, time.time_ns() // 1_000)
