"""An answer as it comes from a worker. Of the worker itself nothing is known here but what ends an answer early.

A stream whose worker is lost ends with `WorkerLost`; one that is closed before its end sends an abort.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextvars import copy_context
from typing import Protocol

from semel.core import Contract, Digest, Feature, Output, Submission
from semel.errors import EngineDead, NotReady, SemelError, ServiceError, WorkerLost, error_for
from semel.render import MakeFeature
from semel.wire.messages import Accepted, Delta, Failed
from semel.wire.outputs import output_of

__all__ = ["RemoteStream", "Sender", "lost"]


def lost() -> WorkerLost:
    """The end of an answer whose worker is gone."""
    return WorkerLost("the worker was lost while it answered; send the request again")


class Sender(Protocol):
    """The worker that a submission went to."""

    @property
    def contract(self) -> Contract:
        """What the worker's engine expects."""
        ...

    def abort(self, stream: RemoteStream) -> None:
        """Let the worker know that nobody waits for a request."""
        ...

    def forget(self, stream: RemoteStream) -> None:
        """Drop what still comes for a request."""
        ...


class RemoteStream:
    """The answer to one submission, as it comes from the worker."""

    def __init__(
        self, submission: Submission, make: MakeFeature, worker: Sender, goes_on: Callable[[bool], bool]
    ) -> None:
        self.request_id = submission.request_id
        self.context = copy_context()
        """In which what its worker lacks is made again: that of its request."""

        self.contract = worker.contract
        self.features: dict[Digest, Feature] = dict(submission.features)
        """What is at hand, until the worker has it."""

        self.sent: set[Digest] = set()
        self._items = Counter(submission.prompt.items)
        self._make: MakeFeature | None = make
        self._goes_on = goes_on
        self._worker = worker
        self._outputs: deque[Output] = deque()
        self._error: SemelError | None = None
        sequences = submission.sampling.get("n", 1)
        assert isinstance(sequences, int)
        self._unfinished = set(range(sequences))
        self._changed = asyncio.Event()
        self._accepted = False

    async def until_accepted(self) -> None:
        """Wait until the worker has all it needs, or refuses."""
        while not self._accepted:
            await self._wait()

    async def __aiter__(self) -> AsyncIterator[Output]:
        """The outputs as they come."""
        while self._unfinished or self._outputs:
            while self._outputs:
                yield self._outputs.popleft()
            if self._unfinished:
                await self._wait()

    async def close(self) -> None:
        """Abort the request, unless its answer is complete."""
        if self._unfinished and self._error is None:
            self._unfinished.clear()
            self._worker.abort(self)
        self._worker.forget(self)

    @property
    def is_answered(self) -> bool:
        """Whether the worker has nothing more to say to it."""
        return not self._unfinished or self._error is not None

    @property
    def goes_on_elsewhere(self) -> bool:
        """Whether its worker failed it, but not for good: another will answer, and count its items."""
        return isinstance(self._error, (NotReady, WorkerLost)) and self._goes_on(self._make is None)

    async def feature(self, digest: Digest) -> Feature:
        """The feature of an item, at hand or made again."""
        if digest not in self.features:
            if self._make is None:
                raise ServiceError("the worker asks for an item of an answer that it has begun")
            self.features[digest] = await self._make(digest)
        return self.features[digest]

    def lookups(self) -> Iterable[tuple[str, int, bool]]:
        """For each item: its modality, how often it is shown, and whether it was only named."""
        return ((item.modality, count, item.digest not in self.sent) for item, count in self._items.items())

    def on_message(self, message: Accepted | Delta | Failed) -> None:
        """The worker has taken the submission, generated more, or given up."""
        match message:
            case Accepted():
                self._accepted = True
                self.features.clear()
            case Delta():
                self._make = None
                self._outputs.append(output_of(message))
                if message.finish_reason is not None:
                    self._unfinished.discard(message.index)
            case Failed():
                its_end = message.code == EngineDead.code  # its worker goes with it
                self._error = lost() if its_end else error_for(message.code, message.message)
        self._changed.set()

    def fail(self, error: SemelError) -> None:
        """There will be no more."""
        self._error = error
        self._changed.set()

    async def _wait(self) -> None:
        if self._error is None:
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None and not self._outputs:
            raise self._error
