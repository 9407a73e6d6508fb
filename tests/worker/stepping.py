"""An engine without a model that runs a few sequences at a time, in order of arrival, as vLLM does."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from semel.core import Contract, Output, Submission
from semel.errors import EngineFailed
from semel.lab.testing.engine import EchoEngine


class SteppedStream:
    """The answer to one submission."""

    def __init__(self, engine: SteppedEngine, request_id: str, sequences: int, tokens: int) -> None:
        self.request_id = request_id
        self.left = dict.fromkeys(range(sequences), tokens)
        """Tokens of each sequence that are not generated yet."""

        self.fails = False
        self._engine = engine
        self._outputs: deque[Output] = deque()
        self._changed = asyncio.Event()

    def generate(self, index: int) -> None:
        self.left[index] -= 1
        is_last = not self.left[index]
        if is_last:
            del self.left[index]
        self._outputs.append(Output(index, "", (7,), finish_reason="length" if is_last else None))
        self._changed.set()

    def fail(self) -> None:
        self.fails = True
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[Output]:
        while self.left or self._outputs:
            while self._outputs:
                yield self._outputs.popleft()
            if self.fails:
                raise EngineFailed("the engine gave up")
            if self.left:
                self._changed.clear()
                await self._changed.wait()

    async def close(self) -> None:
        self._engine.end(self)


class SteppedEngine(EchoEngine):
    """Generates one token a step for each of the sequences that came first."""

    def __init__(self, contract: Contract, capacity: int) -> None:
        super().__init__(contract)
        self.capacity = capacity
        self.streams: list[SteppedStream] = []
        """In order of arrival."""

        self.arrivals: list[str] = []
        self.most = 0
        """Sequences that it had at a time."""

    async def submit(self, submission: Submission) -> SteppedStream:  # type: ignore[override]
        stream = await super().submit(submission)
        if stream.missing:
            return stream  # type: ignore[return-value]
        sampling = submission.sampling
        sequences, tokens = sampling.get("n", 1), sampling.get("max_tokens", 4)
        assert isinstance(sequences, int)
        assert isinstance(tokens, int)
        answer = SteppedStream(self, submission.request_id, sequences, tokens)
        self.streams.append(answer)
        self.arrivals.append(submission.request_id)
        self.most = max(self.most, self.sequences)
        return answer

    @property
    def sequences(self) -> int:
        return sum(len(stream.left) for stream in self.streams)

    def end(self, stream: SteppedStream) -> None:
        if stream in self.streams:
            self.streams.remove(stream)

    def advance(self) -> None:
        running = [(stream, index) for stream in self.streams for index in stream.left][: self.capacity]
        for stream, index in running:
            stream.generate(index)

    async def steps(self) -> None:
        """Step again and again, as long as the task is not cancelled."""
        while True:
            await asyncio.sleep(0.001)
            self.advance()
