"""The workers of a frontend: which of them serve, which one gets a request, and what happens if it is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from semel.core import Contract, Digest
from semel.engine import Submission
from semel.errors import NotReady, WorkerLost
from semel.frontend.balance import Candidate, choose
from semel.frontend.remote import RemoteStream, RemoteWorker
from semel.render import Make

__all__ = ["Fleet"]

logger = logging.getLogger(__name__)


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

    def choose(self, digests: Iterable[Digest]) -> RemoteWorker:
        """The worker for a request with these items."""
        workers = self.serving
        if not workers:
            raise NotReady(f"{self.reason}; try again in a moment")
        distinct = tuple(dict.fromkeys(digests))
        candidates = [
            Candidate(worker.name, worker.load, sum(map(worker.knows, distinct)) if len(workers) > 1 else 0)
            for worker in workers
        ]
        return workers[choose(candidates, distinct)]

    async def submit(self, worker: RemoteWorker, submission: Submission, make: Make) -> RemoteStream:
        """Submit to a worker; if that is lost before it has taken the request, to another one."""
        try:
            return await worker.submit(submission, make)
        except (WorkerLost, NotReady) as error:
            logger.warning("request %s goes to another worker: %s", submission.request_id, error)
            other = self.choose(item.digest for item in submission.prompt.items)
            return await other.submit(submission, make)
