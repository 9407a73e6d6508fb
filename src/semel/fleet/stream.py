"""An answer as it comes from a worker. Of the worker itself nothing is known here but what ends an answer early.

A stream whose worker is lost ends with `WorkerLost`; one that is closed before its end sends an abort.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable
from contextvars import copy_context
from typing import Final, Protocol

from semel.core import Contract, Digest, Feature, Output, Submission
from semel.errors import EngineDead, NotReady, SemelError, ServiceError, WorkerLost, error_for
from semel.fleet.backlog import AnswerRoom, Backlog
from semel.fleet.failover import is_worker_fault
from semel.render import MakeFeature
from semel.wire.messages import Accepted, Delta, Failed
from semel.wire.outputs import to_output

__all__ = ["UNWATCHED", "RemoteStream", "Sender", "StreamWatcher", "lost"]


def lost(*, is_death: bool) -> WorkerLost:
    """The end of an answer whose worker is gone."""
    return WorkerLost("the worker was lost while it answered; send the request again", is_death=is_death)


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


class StreamWatcher(Protocol):
    """Hears how a stream fares, as soon as its worker tells."""

    def goes_on(self, begun: bool) -> bool:
        """Whether another worker will get the request if this one has failed it, given whether its answer had begun."""
        ...

    def on_output(self) -> None:
        """The first output has come."""
        ...

    def on_finish(self) -> None:
        """The answer is complete."""
        ...

    def on_failure(self, error: SemelError, begun: bool) -> None:
        """The worker has given up, or is lost."""
        ...

    def on_abort(self, begun: bool) -> None:
        """Nobody waits for the rest of the answer."""
        ...


class _Unwatched:
    def goes_on(self, begun: bool) -> bool:  # noqa: ARG002
        return False

    def on_output(self) -> None: ...

    def on_finish(self) -> None: ...

    def on_failure(self, error: SemelError, begun: bool) -> None: ...

    def on_abort(self, begun: bool) -> None: ...


UNWATCHED: Final[StreamWatcher] = _Unwatched()
"""For a stream of which nobody hears: no other worker gets its request."""


class RemoteStream:
    """The answer to one submission, as it comes from the worker."""

    def __init__(
        self, submission: Submission, make: MakeFeature, worker: Sender, watcher: StreamWatcher = UNWATCHED
    ) -> None:
        self.request_id = submission.request_id
        self.context = copy_context()
        """In which what its worker lacks is made again: that of its request."""

        self.contract = worker.contract
        self.features: dict[Digest, Feature] = dict(submission.features)
        """What is at hand, until the worker has it."""

        self.sent: set[Digest] = set()
        self._items = Counter(submission.prompt.items)
        self._fields = frozenset(submission.sampling)
        self._make: MakeFeature | None = make
        self._watcher = watcher
        self._worker = worker
        self._outputs: deque[Output] = deque()
        self._backlog = Backlog()
        self._error: SemelError | None = None
        self._overflow: SemelError | None = None
        """Why what waited was dropped, if it was."""

        self._is_closed = False
        self._is_resumable = False
        """Whether the error is one that another worker may not make."""

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
                output = self._outputs.popleft()
                self._backlog.pop()
                yield output
            if self._unfinished:
                await self._wait()
        if self._overflow is not None:
            raise self._overflow

    def charge(self, room: AnswerRoom) -> None:
        """Charge the outputs that wait to a room. If it has no more, the stream overflows."""
        self._backlog.begin(room, len(self._outputs))

    def overflow(self, error: SemelError) -> None:
        """Drop the outputs that wait, and end with this error: there is no room for them."""
        self._outputs.clear()
        self._backlog.clear()
        if not self.is_answered:
            self._worker.abort(self)
            self._watcher.on_abort(self._has_begun)
        self._overflow = error
        self._end(error)

    async def close(self) -> None:
        """Abort the request, unless its answer is complete."""
        if self._unfinished and self._error is None:
            self._unfinished.clear()
            self._worker.abort(self)
            self._watcher.on_abort(self._has_begun)
        self._worker.forget(self)
        # An error that was raised here refers to this stream: without the way back all of it is freed now.
        self._unfinished.clear()
        self._error = self._overflow = None
        self._is_closed = True
        self._changed.set()

    @property
    def is_answered(self) -> bool:
        """Whether the worker has nothing more to say to it."""
        return not self._unfinished or self._error is not None

    @property
    def goes_on_elsewhere(self) -> bool:
        """Whether its worker failed it, but not for good: another will answer, and count its items."""
        return self._is_resumable and self._watcher.goes_on(self._has_begun)

    @property
    def _has_begun(self) -> bool:
        """Whether there was an output: what its items are made of is let go then."""
        return self._make is None

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
                self._on_delta(message)
            case Failed():
                error = error_for(message.code, message.message, self._fields)
                self.break_off(lost(is_death=True) if isinstance(error, EngineDead) else error)  # its worker goes too
        self._changed.set()

    def _on_delta(self, delta: Delta) -> None:
        if self._error is not None:  # it was ended here, and the worker does not know yet
            return
        if not self._has_begun:
            self._make = None
            self._watcher.on_output()
        self._outputs.append(output := to_output(delta))
        try:
            self._backlog.push(output, len(self._outputs))
        except SemelError as error:
            self.overflow(error)
            return
        if delta.finish_reason is not None and delta.index in self._unfinished:
            self._unfinished.discard(delta.index)
            if not self._unfinished:
                self._watcher.on_finish()

    def break_off(self, error: SemelError) -> None:
        """Its worker has given up, or is lost."""
        if self._unfinished and self._error is None:
            self._is_resumable = is_worker_fault(error) or isinstance(error, NotReady)
            self._watcher.on_failure(error, self._has_begun)
        self._end(error)

    def fail(self, error: SemelError) -> None:
        """There will be no more, and that is not its worker's doing."""
        self._watcher.on_abort(begun=False)
        self._end(error)

    def _end(self, error: SemelError) -> None:
        self._error = error
        self._changed.set()

    async def _wait(self) -> None:
        if self._error is None and not self._is_closed:
            self._changed.clear()
            await self._changed.wait()
        if self._is_closed:
            raise ServiceError("the answer was closed while it was waited for")
        if self._error is not None and not self._outputs:
            raise self._error
