"""An operator's control over a worker's engine: pause, sleep, new weights. The worker's frontends hear of a pause.

vLLM's engine queues what comes while it is paused, and so does a worker. What waits for its turn here is in the engine
as far as a client can tell: who aborts what is under way aborts that, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from semel.engine import EngineControl
from semel.engine.protocol import PauseMode, WeightUpdate
from semel.worker.worker import Worker

__all__ = ["WorkerControl"]


class WorkerControl:
    """The engine of a worker, as its operator controls it."""

    def __init__(self, engine: EngineControl, worker: Worker) -> None:
        self.engine = engine
        self._worker = worker
        self._pauses = 0
        """Pauses that are being asked for: the frontends hear of one before it has begun."""

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Pause the engine. With `abort` also the requests end that wait for it."""
        async with self._pausing(mode):
            await self.engine.pause(mode, clear_cache=clear_cache)

    async def resume(self) -> None:
        """Let the engine go on."""
        async with self._reporting():
            await self.engine.resume()

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Let the engine sleep."""
        async with self._pausing(mode):
            await self.engine.sleep(level, mode)

    async def wake_up(self, tags: list[str] | None) -> bool:
        """Wake it up; returns whether it goes on."""
        async with self._reporting():
            return await self.engine.wake_up(tags)

    async def update_weights(self, step: WeightUpdate, info: Any = None) -> None:
        """Do a step of a transfer of weights, during which the engine is paused."""
        async with self._reporting():
            await self.engine.update_weights(step, info)

    async def collective_rpc(
        self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], timeout_s: float | None
    ) -> list[Any]:
        """Call an allowed method of all worker processes. One that changes weights and fails leaves a pause."""
        async with self._reporting():
            return await self.engine.collective_rpc(method, args, kwargs, timeout_s)

    async def abort_requests(self, request_ids: Collection[str]) -> int:
        """End these requests, or all of them if none is named. Returns their number."""
        found = self._worker.request_ids(request_ids)
        waiting = self._worker.abort_waiting(found)
        if submitted := found - waiting:
            await self.engine.abort(submitted)
        return len(found)

    @asynccontextmanager
    async def _pausing(self, mode: PauseMode) -> AsyncIterator[None]:
        """Tell the frontends of a pause that begins inside, and end the requests that wait for it to end with it."""
        self._pauses += 1
        self._worker.set_paused(True)
        if mode == "abort":
            self._worker.abort_waiting(self._worker.request_ids())
        async with self._reporting():
            try:
                yield
            finally:
                self._pauses -= 1

    @asynccontextmanager
    async def _reporting(self) -> AsyncIterator[None]:
        """Tell the frontends at the end whether the engine is paused now, or will be at once."""
        try:
            yield
        finally:
            await asyncio.shield(self._tell_state())

    async def _tell_state(self) -> None:
        is_paused = await self.engine.is_paused() or await self.engine.is_sleeping()  # answers keep their order
        self._worker.set_paused(bool(self._pauses) or is_paused)
