"""An engine without a model that generates at a steady rate, with one step for all its requests, as a real engine does.

Its answers are numbered words with the time of their generation. A reader can see that none is missing, repeated or out
of order, and how long each took to arrive. Items are checked and cached as by the `EchoEngine`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Final, TypeVar

from blake3 import blake3

from semel.core import Contract, Output, Submission
from semel.lab.testing.engine import EchoEngine, EchoStream

_Stream = TypeVar("_Stream", bound="PacedStream")

__all__ = ["DeterministicEngine", "DeterministicStream", "PacedEngine", "PacedStream", "word"]

_DEFAULT_TOKENS: Final = 16
_LOST_EVERY: Final = 25


def word(number: int) -> str:
    """The number-th word of an answer, generated now: number and time, in µs of the clock that all processes share."""
    return f" {number}@{time.monotonic_ns() // 1000}"


class PacedStream:
    """The answer to one submission, as the engine's steps make it."""

    def __init__(self, engine: PacedEngine, tokens: int) -> None:
        self._engine = engine
        self._tokens = tokens
        self._made = 0
        self._outputs: deque[Output] = deque()
        self._changed = asyncio.Event()

    def step(self) -> bool:
        """Generate a token. Returns whether more follow."""
        self._made += 1
        is_last = self._made >= self._tokens
        self._outputs.extend(self._generate(self._made, "length" if is_last else None))
        self._changed.set()
        return not is_last

    def _generate(self, number: int, finish_reason: str | None) -> Iterator[Output]:
        """Yield the number-th output of each sequence, from 1 on."""
        yield Output(0, word(number - 1), (number,), finish_reason=finish_reason)

    async def __aiter__(self) -> AsyncIterator[Output]:
        """Yield one token at a time."""
        while True:
            while self._outputs:
                yield self._outputs.popleft()
            if self._made >= self._tokens:
                return
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        """Stop generating."""
        self._engine.end(self)


class PacedEngine(EchoEngine):
    """Generates a fixed number of tokens per second for each of its requests.

    With one phase all requests get their tokens in the same step. With more, requests are assigned to the phases in
    turn.
    """

    def __init__(self, contract: Contract, *, rate: float, phases: int = 1) -> None:
        super().__init__(contract)
        self.aborted = 0
        """Requests that were closed before their end."""

        self._step_s = 1 / rate / phases
        self._phases: list[set[PacedStream]] = [set() for _ in range(phases)]
        self._begun = 0
        self._steps = 0
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    @property
    def running(self) -> int:
        """The number of generating requests."""
        return sum(map(len, self._phases))

    async def submit(self, submission: Submission) -> PacedStream:  # type: ignore[override]
        """Accept a submission. Its first token comes with a step of its phase."""
        await super().submit(submission)
        return self._pace(PacedStream(self, _count(submission, "max_tokens", _DEFAULT_TOKENS)))

    def _pace(self, stream: _Stream) -> _Stream:
        """Give a stream its place in a phase."""
        self._phases[self._begun % len(self._phases)].add(stream)
        self._begun += 1
        self.progress.set_requests(self.running)
        if self._timer is None:
            self._due = asyncio.get_running_loop().time()
            self._wait()
        return stream

    def end(self, stream: PacedStream) -> None:
        """Stop generating an answer."""
        for phase in self._phases:
            if stream in phase:
                phase.remove(stream)
                self.aborted += 1
        self.progress.set_requests(self.running)

    def _wait(self) -> None:
        self._due += self._step_s  # not from now on: otherwise one delay would shift all later steps
        self._timer = asyncio.get_running_loop().call_at(self._due, self._step)

    def _step(self) -> None:
        phase = self._phases[self._steps % len(self._phases)]
        self._steps += 1
        for stream in [stream for stream in phase if not stream.step()]:
            phase.remove(stream)
        self.progress.step()
        self.progress.set_requests(self.running)
        self._timer = None
        if self.running:
            self._wait()


class DeterministicStream(PacedStream):
    """An answer whose tokens are a function of the request: of its prompt and of the features that the engine found."""

    def __init__(self, engine: PacedEngine, seed: bytes, *, tokens: int, sequences: int) -> None:
        super().__init__(engine, tokens)
        self._sequences = [blake3(seed + bytes([index])).digest(length=tokens) for index in range(sequences)]

    def _generate(self, number: int, finish_reason: str | None) -> Iterator[Output]:
        for index, tokens in enumerate(self._sequences):
            token = tokens[number - 1]
            yield Output(index, f" {token}", (token,), finish_reason=finish_reason)


class DeterministicEngine(PacedEngine):
    """A paced engine that answers a request alike at any time and in any process, unless an item came out differently.

    Now and then it loses an item that it lists as cached, as an engine core does whose cache has drifted.
    """

    def __init__(self, contract: Contract, *, rate: float, phases: int = 1) -> None:
        super().__init__(contract, rate=rate, phases=phases)
        self._until_loss = _LOST_EVERY

    async def submit(self, submission: Submission) -> PacedStream | EchoStream:  # type: ignore[override]
        """Accept a submission. Its first token comes with a step of its phase, unless an item was lost."""
        self._lose_one_of(submission)
        answer = await EchoEngine.submit(self, submission)
        if answer.missing:
            return answer
        tokens, sequences = _count(submission, "max_tokens", _DEFAULT_TOKENS), _count(submission, "n", 1)
        return self._pace(DeterministicStream(self, bytes(answer.tokens), tokens=tokens, sequences=sequences))

    def _lose_one_of(self, submission: Submission) -> None:
        items = (item.digest for item in submission.prompt.items)
        if (one := next((one for one in items if one not in submission.features and self.holds(one)), None)) is None:
            return
        self._until_loss -= 1
        if not self._until_loss:
            self._until_loss = _LOST_EVERY
            self.lost.add(one)


def _count(submission: Submission, name: str, default: int) -> int:
    """Return a positive number of the sampling parameters."""
    value = submission.sampling.get(name)
    return value if isinstance(value, int) and value > 0 else default
