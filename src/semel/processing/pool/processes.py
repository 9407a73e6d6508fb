"""The processes of a pool: started, kept at their number, ended. What they work on is the pool's affair.

A spare process, loaded, takes the place of one that ended at once, and another spare is started while the rest goes on.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from semel.errors import ConfigError
from semel.processing.pool.fork_server import ForkServer
from semel.processing.pool.pipe import Description, Load
from semel.processing.pool.process import END_TIMEOUT_S, PoolProcess

__all__ = ["CRASHES", "ProcessSet"]

CRASHES: Final = {
    -getattr(signal, name) for name in ("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP")
}
"""Exit statuses of a process whose own code has ended it."""

_MIN_RETRY_S: Final = 1.0
_MAX_RETRY_S: Final = 30.0

logger = logging.getLogger(__name__)


class ProcessSet:
    """A number of processes that have loaded the same processor, and spare ones."""

    def __init__(
        self,
        load: Load,
        processes: int,
        *,
        stages: bool,
        prepared: Sequence[PoolProcess] = (),
        fork_server: ForkServer | None = None,
    ) -> None:
        self.load = load
        self.children: list[PoolProcess] = []
        """Those that work."""
        self.spares: list[PoolProcess] = []
        """Those that are loaded, and get nothing to do until they take the place of one that works."""
        self.replaced = 0
        """Processes that took the place of one that had ended."""
        self.failure = ""
        """Why there is no process, if none can be started."""
        self.fork_server = fork_server or ForkServer(Path(load.folder))
        """What they are forked from."""
        self._processes = processes
        self._stages = stages
        self._prepared = list(prepared)  # spawned before it was known what to load
        self._restarts: list[asyncio.Task[None]] = []
        self._description: Description | None = None
        self._on_change: Callable[[], None] = lambda: None

    @property
    def description(self) -> Description:
        """The processor that every process has loaded."""
        assert self._description is not None, "processes that have started have a description"
        return self._description

    async def start(self, spares: int, *, on_change: Callable[[], None]) -> None:
        """Wait until each process has loaded its processor; the spare ones follow by themselves.

        `on_change` is called whenever a process begins to work, or none can be started.
        """
        self._on_change = on_change
        try:
            async with asyncio.TaskGroup() as starts:
                for _ in range(self._processes):
                    starts.create_task(self._add())
        except ExceptionGroup as group:
            await self.close()
            raise group.exceptions[0] from None
        except BaseException:
            await self.close()
            raise
        self._log_sandbox()
        self._restarts = [asyncio.create_task(self._keep(child)) for child in self.children]
        self._restarts += [asyncio.create_task(self._keep_spare()) for _ in range(spares)]

    def _log_sandbox(self) -> None:
        """Say once what is around the processes; they have the same kernel."""
        sandbox = self.children[0].sandbox
        if sandbox.is_whole:
            logger.info("preprocessing processes run in a sandbox: %s", sandbox)
        else:
            logger.warning(
                "preprocessing processes run in a sandbox that is not whole: %s; a decoder that is taken over has what "
                "is not refused to it (--require-sandbox does not start so)",
                sandbox,
            )

    def lend_spare(self) -> None:
        """Let a spare work, if only one process does: a tenant's item must not wait for another's (threats S29)."""
        if len(self.children) == self._processes == 1 and self.spares:
            self.children.append(self.spares.pop(0))

    async def close(self) -> None:
        """End all processes. Closing twice does no harm."""
        for task in self._restarts:
            task.cancel()
        await asyncio.gather(*self._restarts, return_exceptions=True)
        processes = (*self.children, *self.spares, *self._prepared)
        await asyncio.gather(*(process.end(within_s=END_TIMEOUT_S) for process in processes))
        await asyncio.gather(*(process.release() for process in processes))
        self.children.clear()
        self.spares.clear()
        self._prepared.clear()
        await self.fork_server.close()

    async def _keep(self, process: PoolProcess) -> None:
        """Let others take the place of a process whenever it ends."""
        while True:
            status = await process.wait()
            self._part_with(process)
            if status in CRASHES:
                self.fork_server.count_crash()
            logger.warning("pool process %d ended with status %d; starting another", process.pid, status)
            await process.release()
            ended, process = process, await self._another()
            ended.on_replaced()

    async def _keep_spare(self) -> None:
        await self._keep(await self._another())

    def _part_with(self, process: PoolProcess) -> None:
        """Let a spare take the place of a process that has ended, if there is one."""
        if process in self.spares:
            self.spares.remove(process)
            return
        self.children.remove(process)
        if self.spares:
            self.children.append(self.spares.pop(0))
            self.replaced += 1
            self._on_change()

    async def _another(self) -> PoolProcess:
        """Start a process, however often it takes; it works if one is missing, and is a spare if none is."""
        pause_s = _MIN_RETRY_S
        while True:
            try:
                process = await self._add()
            except Exception as error:  # noqa: BLE001 - whatever it was, nobody else would try again
                logger.error("a pool process cannot be started, next try in %g s: %s", pause_s, error)  # noqa: TRY400
            else:
                self.replaced += process in self.children
                self.failure = ""
                self._on_change()
                return process
            if not self.children:
                self.failure = "no preprocessing process can be started; the log of this frontend says why"
                self._on_change()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_RETRY_S)

    def _load_order(self) -> Load:
        """Processes that start together run the probes; who takes the place of one needs not: it has the same files."""
        if self._description is None or self._description.probes is None:
            return self.load
        return msgspec.structs.replace(self.load, probes=self._description.probes)

    def _take_prepared(self) -> PoolProcess | None:
        while self._prepared:
            if (process := self._prepared.pop()).running:
                return process
        return None

    async def _add(self) -> PoolProcess:
        # Once there are others that work, it must not take the processors from them.
        process = self._take_prepared()
        if process is None:
            limit = self.load.max_memory_bytes
            process = await PoolProcess.spawn(
                limit, fork_server=self.fork_server, stages=self._stages, in_background=bool(self.children)
            )
        description = await process.load(self._load_order())
        self._description = self._description or description
        if description.fingerprint != self._description.fingerprint:
            await process.end(within_s=0)
            await process.release()
            raise ConfigError(
                f"processes of one pool loaded different processors from {self.load.folder}; "
                f"restart semel after changing a model folder"
            )
        (self.children if len(self.children) < self._processes else self.spares).append(process)
        return process
