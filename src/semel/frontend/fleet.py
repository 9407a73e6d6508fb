"""The workers of a frontend: which of them serve, which one gets a request, and what happens if it is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace

from semel.core import Contract, Digest
from semel.engine import Output, Submission
from semel.errors import NotReady, SemelError, WorkerLost
from semel.frontend.balance import Candidate, choose
from semel.frontend.remote import RemoteStream, RemoteWorker
from semel.render import Make

__all__ = ["Fleet", "FleetStream"]

logger = logging.getLogger(__name__)


class FleetStream:
    """An answer that survives the loss of its worker, as long as nothing of it has been given out."""

    def __init__(
        self, fleet: Fleet, worker: RemoteWorker, stream: RemoteStream, submission: Submission, make: Make
    ) -> None:
        self._fleet = fleet
        self._worker = worker
        self._stream = stream
        self._again: tuple[Submission, Make] | None = (submission, make)
        """With what to submit again; None when the answer has begun, or there was a second time."""

    async def __aiter__(self) -> AsyncIterator[Output]:
        """The outputs as they come."""
        while True:
            try:
                async for output in self._stream:
                    self._again = None
                    yield output
            except WorkerLost as error:
                if self._again is None:
                    raise
                await self._stream.close()
                again, self._again = self._again, None
                self._stream = await self._fleet.submit_again(self._worker, *again, error)
            else:
                return

    async def close(self) -> None:
        """Abort the request, unless its answer is complete."""
        await self._stream.close()


class Fleet:
    """Any number of workers that serve one model."""

    def __init__(self, workers: Sequence[RemoteWorker]) -> None:
        self.workers = tuple(workers)
        self._refused: dict[RemoteWorker, str] = {}

    @property
    def serving(self) -> list[RemoteWorker]:
        """The workers that take requests."""
        return [worker for worker in self.workers if worker.is_connected and worker not in self._refused]

    @property
    def contract(self) -> Contract | None:
        """What the engines of the serving workers expect: the same of all of them. None while nobody serves."""
        return next((worker.contract for worker in self.serving), None)

    @property
    def reason(self) -> str:
        """Why nobody serves."""
        return next((self._refused.get(worker) or worker.reason for worker in self.workers), "there is no worker")

    async def run(self) -> None:
        """Take in what the workers send, until the links are closed."""
        async with asyncio.TaskGroup() as group:
            for worker in self.workers:
                group.create_task(worker.run())

    async def changed(self) -> None:
        """Wait until a worker comes or goes."""
        waiting = [asyncio.create_task(worker.changed()) for worker in self.workers]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()

    def admit(self, fault: Callable[[Contract], str | None]) -> None:
        """Leave out the workers whose contract we cannot keep."""
        self._refused = {
            worker: reason
            for worker in self.workers
            if worker.is_connected and (reason := fault(worker.contract)) is not None
        }
        for worker, reason in self._refused.items():
            logger.error("the worker at %s is not used: %s", worker.name, reason)

    def choose(self, digests: Iterable[Digest], without: RemoteWorker | None = None) -> RemoteWorker:
        """The worker for a request with these items."""
        workers = [worker for worker in self.serving if worker is not without]
        if not workers:
            raise NotReady(f"{self.reason}; try again in a moment")
        distinct = tuple(dict.fromkeys(digests))
        candidates = [
            Candidate(worker.name, worker.load, sum(map(worker.knows, distinct)) if len(workers) > 1 else 0)
            for worker in workers
        ]
        return workers[choose(candidates, distinct)]

    async def submit(self, worker: RemoteWorker, submission: Submission, make: Make) -> FleetStream:
        """Submit to a worker; if that is lost before its first output, to another one."""
        has_other = any(other is not worker for other in self.serving)
        try:
            stream = await worker.submit(submission, make, may_go_on=has_other)
        except (WorkerLost, NotReady) as error:
            stream = await self.submit_again(worker, submission, make, error)
        return FleetStream(self, worker, stream, replace(submission, features={}), make)

    async def submit_again(
        self, lost: RemoteWorker, submission: Submission, make: Make, error: SemelError
    ) -> RemoteStream:
        """Submit to another worker than the one that was lost, if there is one."""
        try:
            other = self.choose((item.digest for item in submission.prompt.items), without=lost)
        except NotReady:
            raise error from None
        logger.warning("request %s goes to another worker: %s", submission.request_id, error)
        return await other.submit(submission, make)
