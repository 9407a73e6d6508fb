"""An answer: as it comes from a worker (`RemoteStream`), and as a frontend reads it, whichever worker it comes from.

A stream whose worker is lost ends with `WorkerLost`; one that is closed before its end sends an abort. The memory of
outputs that wait, for a slow reader or for the rest of their answer, is charged to a room (threats S21).
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import Final, Protocol, Self

from semel.core import Contract, Digest, Feature, Output, Submission
from semel.engine.observed import Observed
from semel.errors import EngineDead, NotReady, SemelError, ServiceError, WorkerLost, error_for
from semel.fleet.retry_policy import RetryPolicy, is_worker_fault
from semel.render import MakeFeature
from semel.wire.messages import Delta, Failed, Pooled
from semel.wire.outputs import to_output

__all__ = [
    "AnswerReader",
    "AnswerRoom",
    "BufferedAnswer",
    "RemoteStream",
    "Sender",
    "StreamedAnswer",
    "TokenCounts",
    "lost",
    "output_bytes",
]

_OUTPUT_BYTES: Final = 400
_STRIDE_TOKENS: Final = 16  # of an answer that is not streamed: of 128 tokens worker and frontend see 9 outputs
_LOGPROB_BYTES: Final = 140  # and as much of its text: with 20 of them a token takes 5.6 KB, measured in a frontend


def lost(*, is_death: bool) -> WorkerLost:
    """Return the error that ends an answer whose worker is gone."""
    return WorkerLost("the worker was lost while it answered; send the request again", is_death=is_death)


class AnswerRoom(Protocol):
    """The budget to which the memory of an answer is charged."""

    free_outputs: int  # plain outputs that may wait uncharged: a reader that keeps up costs nothing

    def hold(self, nbytes: int) -> None:
        """Charge so much more, or raise."""

    def drop(self, nbytes: int) -> None:
        """Release the bytes of outputs that were read."""

    def clear(self) -> None:
        """Release all of the answer."""


class Sender(Protocol):
    """The worker that a submission went to."""

    @property
    def contract(self) -> Contract:
        """The contract of the worker's engine."""

    def abort(self, stream: RemoteStream) -> None:
        """Let the worker know that nobody waits for a request."""

    def forget(self, stream: RemoteStream) -> None:
        """Drop what still comes for a request."""


class RemoteStream:
    """The answer to one submission, as it comes from the worker. Without a `watcher` no other worker gets it."""

    def __init__(
        self, submission: Submission, make: MakeFeature, worker: Sender, watcher: RetryPolicy | None = None
    ) -> None:
        self.request_id = submission.request_id
        self.context = copy_context()  # in which what its worker lacks is made again: that of its request
        self.contract = worker.contract
        self.features: dict[Digest, Feature] = dict(submission.features)  # at hand, until the worker has them
        self.sent: set[Digest] = set()
        self.items = Counter(submission.prompt.items)
        self._fields = frozenset(submission.sampling)
        self._make: MakeFeature | None = make
        self._watcher = watcher
        self._worker = worker
        self.outputs: deque[Output] = deque()  # those that wait to be read
        self._room: AnswerRoom | None = None
        self._sizes: deque[int] = deque()  # charged for each of them, once there is a room
        self._error: SemelError | None = None
        self._has_overflowed = False  # outputs that waited were dropped
        self._is_closed = False
        self._is_resumable = False  # the error is one that another worker may not make
        sequences = submission.sampling.get("n", 1)
        assert isinstance(sequences, int)
        self._unfinished = set(range(sequences))
        self.changed = asyncio.Event()  # set by every message, and by the end
        self._accepted = False

    async def until_accepted(self) -> None:
        """Wait until the worker has all it needs, or refuses."""
        while not self._accepted and not self.is_over():
            await self.changed.wait()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        """Return the next output, as soon as it comes."""
        while not self.outputs:
            if self.is_over():
                raise StopAsyncIteration
            await self.changed.wait()
        return self.pop()

    def is_over(self) -> bool:
        """Return whether no output will come any more, or raise what ended the stream. Else `changed` announces one."""
        if self._unfinished or self._has_overflowed:
            if self._is_closed:
                raise ServiceError("the answer was closed while it was waited for")
            if self._error is not None:
                raise self._error
        self.changed.clear()
        return not self._unfinished

    def pop(self) -> Output:
        """Take out the oldest output that waits."""
        if self._room is not None and (size := self._sizes.popleft()):
            self._room.drop(size)
        return self.outputs.popleft()

    def put_back(self, output: Output) -> None:
        """Make an output that was taken out the next one again. It is not charged any more."""
        if self._room is not None:
            self._sizes.appendleft(0)
        self.outputs.appendleft(output)

    def charge(self, room: AnswerRoom) -> None:
        """Charge the outputs while they wait: those that came with the acceptance, and all that come from now on.

        If the room has no more, the stream overflows.
        """
        self._room = room
        for number, output in enumerate(tuple(self.outputs), 1):
            self._sizes.append(0)
            is_plain = output.logprobs is None and output.prompt_logprobs is None
            if (not is_plain or number > room.free_outputs) and not self._hold(room, output):
                return

    def overflow(self, error: SemelError) -> None:
        """Drop the outputs that wait, and end with this error: there is no room for them."""
        self.outputs.clear()
        self._sizes.clear()
        if self._room is not None:
            self._room.clear()
        if not self.is_answered:
            self._abort()
        self._has_overflowed = True
        self._end(error)

    async def close(self) -> None:
        """Abort the request, unless its answer is complete."""
        if not self.is_answered:
            self._abort()
        self._worker.forget(self)
        # An error that was raised here refers to this stream: without the way back all of it is freed now.
        self._error = None
        self._is_closed = True
        self.changed.set()

    @property
    def is_answered(self) -> bool:
        """Return whether the worker has nothing more to say to it."""
        return not self._unfinished or self._error is not None or self._is_closed

    @property
    def goes_on_elsewhere(self) -> bool:
        """Return whether its worker failed it, but not for good: another will answer, and count its items."""
        return self._is_resumable and self._watcher is not None and self._watcher.goes_on(self._has_begun)

    @property
    def _has_begun(self) -> bool:
        """Return whether there was an output: what its items are made of is let go then."""
        return self._make is None

    async def feature(self, digest: Digest) -> Feature:
        """Return the feature of an item, at hand or made again."""
        if digest not in self.features:
            if self._make is None:
                raise ServiceError("the worker asks for an item of an answer that it has begun")
            self.features[digest] = await self._make(digest)
        return self.features[digest]

    def lookups(self) -> Iterable[tuple[str, int, bool]]:
        """Return for each item its modality, how often it is shown, and whether it was only named."""
        return ((item.modality, count, item.digest not in self.sent) for item, count in self.items.items())

    def on_accepted(self) -> None:
        """Note that the worker has taken the submission."""
        self._accepted = True
        self.features.clear()
        self.changed.set()

    def on_failed(self, failed: Failed) -> None:
        """End with the error that the worker reports."""
        error = error_for(failed.code, failed.message, self._fields)
        self.break_off(lost(is_death=True) if isinstance(error, EngineDead) else error)  # its worker goes too

    def on_delta(self, delta: Delta | Pooled) -> None:
        """Take what the worker has generated."""
        if self._error is not None:  # it was ended here, and the worker does not know yet
            return
        if self._make is not None:
            self._make = None
            if self._watcher is not None:
                self._watcher.on_output()
        self.outputs.append(output := to_output(delta))
        if (room := self._room) is not None:
            self._sizes.append(0)
            is_plain = output.logprobs is None and output.prompt_logprobs is None
            if (not is_plain or len(self.outputs) > room.free_outputs) and not self._hold(room, output):
                return
        if delta.finish_reason is not None and delta.index in self._unfinished:
            self._unfinished.discard(delta.index)
            if not self._unfinished and self._watcher is not None:
                self._watcher.on_finish()
        self.changed.set()

    def break_off(self, error: SemelError) -> None:
        """End because its worker has given up, or is lost."""
        if self._unfinished and self._error is None:
            self._is_resumable = is_worker_fault(error) or isinstance(error, NotReady)
            if self._watcher is not None:
                self._watcher.on_failure(error, self._has_begun)
        self._end(error)

    def fail(self, error: SemelError) -> None:
        """End for a reason that is not its worker's doing."""
        if self._watcher is not None:
            self._watcher.on_abort(begun=False)
        self._end(error)

    def _hold(self, room: AnswerRoom, output: Output) -> bool:
        """Charge the last output of those that have a size. Returns False if there is no room, and it overflows."""
        try:
            room.hold(size := output_bytes(output))
        except SemelError as error:
            self.overflow(error)
            return False
        self._sizes[-1] = size
        return True

    def _abort(self) -> None:
        self._worker.abort(self)
        if self._watcher is not None:
            self._watcher.on_abort(self._has_begun)

    def _end(self, error: SemelError) -> None:
        self._error = error
        self.changed.set()


SubmitAgain = Callable[[SemelError], Awaitable[RemoteStream]]
"""Submits to another worker than the one that failed, or raises the error."""


@dataclass(slots=True)
class TokenCounts:
    """Tokens of one model's requests, as this frontend saw them: those that went in and those that came back."""

    prompt: int = 0
    generation: int = 0


class AnswerReader(Protocol):
    """The request that an answer is for."""

    observed: Observed | None  # sees the outputs, if the request's span is recorded

    def waiting(self) -> AbstractContextManager[object]:
        """Enter the scope in which it waits for its first output."""

    def begin(self) -> None:
        """Take note that the first output is there."""

    def end(self) -> None:
        """Take note that the answer is closed."""


class StreamedAnswer:
    """An answer that survives the loss or failure of its worker, as long as nothing of it has been given out."""

    def __init__(
        self,
        stream: RemoteStream,
        policy: RetryPolicy,
        again: SubmitAgain | None,
        tokens: TokenCounts,
    ) -> None:
        self._policy = policy
        self._stream = stream
        self._again = again  # None when the answer has begun, there was a second time, or nobody else is
        self._tokens = tokens
        self._has_begun = False
        self._room: AnswerRoom | None = None
        self._reader: AnswerReader | None = None
        self._observed: Observed | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        """Return the next output, as soon as it comes. Each token passes here: one coroutine waits for it."""
        if self._has_begun:
            stream = self._stream
            while not stream.outputs:
                if stream.is_over():
                    raise StopAsyncIteration
                await stream.changed.wait()
            output = stream.pop()
        else:
            output = await self._first()
        self._tokens.generation += len(output.token_ids)
        if self._observed is not None:
            self._observed.take(output)
        return output

    def charge(self, room: AnswerRoom) -> None:
        """Charge what has come of the answer and waits to a room, whichever worker it comes from."""
        self._room = room
        self._stream.charge(room)

    def serve(self, reader: AnswerReader) -> None:
        """Let the answer's request know when it begins and ends."""
        self._reader, self._observed = reader, reader.observed

    async def begin(self) -> None:
        """Wait for the first output, which is still the next one to be read. Closes the answer if there is none."""
        try:
            output = await self._first()
            self._stream.put_back(output)  # that of the worker which answers, perhaps not the first one
        except BaseException:
            await self.close()
            raise

    def overflow(self, error: SemelError) -> None:
        """Drop what waits of the answer, and end it with this error: there is no room for it any more."""
        self._stream.overflow(error)

    async def close(self) -> None:
        """Abort the request, unless its answer is complete."""
        if self._reader is not None:
            self._reader.end()
        await self._stream.close()
        self._policy.settle()
        if self._room is not None:
            self._room.clear()

    async def _first(self) -> Output:
        """Return the first output. Until it is there, another worker can get the request."""
        reader = self._reader
        with nullcontext() if reader is None else reader.waiting():
            while not self._has_begun:
                try:
                    output = await self._next()
                    self._has_begun = True
                except SemelError as error:
                    await self._go_on(error)
        self._again = None
        if reader is not None:
            reader.begin()
        return output

    def _next(self) -> Awaitable[Output]:
        """Wait for what is given out first."""
        return self._stream.__anext__()

    async def _go_on(self, error: SemelError) -> None:
        """Have another worker answer, or raise the error."""
        if self._again is None or not self._policy.is_resumable(error):
            raise error
        await self._stream.close()
        again, self._again = self._again, None
        self._stream = await again(error)
        if self._room is not None:
            self._room.clear()
            self._stream.charge(self._room)


class BufferedAnswer(StreamedAnswer):
    """An answer that is given out when it is complete: until then another worker can begin it anew."""

    @staticmethod
    def in_strides(submission: Submission) -> Submission:
        """Have the worker send the first token, and then some at a time, so that budgets and shares see it grow."""
        if "task" in submission.sampling:  # it pools
            return submission
        return replace(submission, sampling={"stream_interval": _STRIDE_TOKENS, **submission.sampling})

    async def _next(self) -> Output:
        """Return the first output, once all of them are there: the others wait behind it."""
        while not self._stream.is_over():
            await self._stream.changed.wait()
        if not self._stream.outputs:
            raise StopAsyncIteration
        return self._stream.pop()


def output_bytes(output: Output) -> int:
    """Estimate the memory of an output, until it is sent."""
    entries = 0
    for steps in (output.logprobs, output.texts, output.prompt_logprobs):
        entries += 0 if steps is None else sum(0 if step is None else len(step) for step in steps)
    pooled = 0 if output.pooling is None else len(output.pooling.data)
    return _OUTPUT_BYTES + 4 * len(output.text) + 36 * len(output.token_ids) + _LOGPROB_BYTES * entries + pooled
