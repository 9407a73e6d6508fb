"""An engine without a model that generates at a steady rate, with one step for all its requests, as a real engine does.

Its answers are numbered words with the time of their generation. A reader can see that none is missing, repeated or out
of order, and how long each took to arrive. Items are checked and cached as by the `EchoEngine`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Final

from semel.core import Contract, Output, Submission
from semel.lab.testing.engine import EchoEngine

__all__ = ["PacedEngine", "PacedStream", "word"]

_DEFAULT_TOKENS: Final = 16


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
        text = word(self._made - 1)
        self._outputs.append(Output(0, text, (self._made,), finish_reason="length" if is_last else None))
        self._changed.set()
        return not is_last

    async def __aiter__(self) -> AsyncIterator[Output]:
        """Yield one token at a time."""
        sent = 0
        while sent < self._tokens:
            while self._outputs:
                sent += 1
                yield self._outputs.popleft()
            if sent < self._tokens:
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
        tokens = submission.sampling.get("max_tokens")
        stream = PacedStream(self, tokens if isinstance(tokens, int) else _DEFAULT_TOKENS)
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
