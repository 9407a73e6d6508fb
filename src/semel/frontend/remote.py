"""A worker's engine as its frontend sees it: the `Engine` protocol over a link.

What is sent is complete when the worker has accepted it, and a stream whose worker is lost ends with `WorkerLost`. A
stream that is closed before its end sends an abort, and what was still to be sent for it is withdrawn.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator

from semel.core import Contract
from semel.engine import Output, Submission
from semel.errors import NotReady, ProtocolError, SemelError, WorkerLost, error_for
from semel.wire.events import Closed, Event, Opened, Reset
from semel.wire.messages import Abort, Accepted, Delta, Draining, Failed, Load
from semel.wire.translation import submit_of
from semel.wire.zmq import FrontendLink, Transfer

__all__ = ["RemoteEngine", "RemoteStream"]

logger = logging.getLogger(__name__)


class RemoteStream:
    """The answer to one submission, as it comes from the worker."""

    def __init__(self, request_id: str, engine: RemoteEngine, *, sequences: int) -> None:
        self.transfers: list[Transfer] = []
        """What was sent for it, to be withdrawn if it is closed before its end."""

        self._request_id = request_id
        self._engine = engine
        self._outputs: deque[Output] = deque()
        self._error: SemelError | None = None
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
            self._engine.abort(self._request_id, self.transfers)
        self._engine.forget(self._request_id)

    def on_message(self, message: Accepted | Delta | Failed) -> None:
        """The worker has taken the submission, generated more, or given up."""
        match message:
            case Accepted():
                self._accepted = True
            case Delta(_, index, text, token_ids, finish_reason, logprobs):
                self._outputs.append(Output(index, text, token_ids, logprobs, finish_reason))
                if finish_reason is not None:
                    self._unfinished.discard(index)
            case Failed():
                self._error = error_for(message.code, message.message)
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


class RemoteEngine:
    """The engine of the worker at the other end of a link."""

    def __init__(self, link: FrontendLink) -> None:
        self._link = link
        self._contract: Contract | None = None
        self._reason = "the worker is starting"
        self._changed = asyncio.Event()
        self._streams: dict[str, RemoteStream] = {}
        self.running = 0
        """Requests that the worker's engine is answering, of all frontends."""

    @property
    def is_connected(self) -> bool:
        """Whether there is a worker at the other end."""
        return self._contract is not None

    @property
    def contract(self) -> Contract:
        """What the worker's engine expects."""
        if self._contract is None:
            raise NotReady(f"{self._reason}; try again in a moment")
        return self._contract

    async def changed(self) -> tuple[Contract | None, str]:
        """Wait until the worker comes or goes; its contract, or None and the reason."""
        await self._changed.wait()
        self._changed.clear()
        return self._contract, self._reason

    async def run(self) -> None:
        """Take in what comes over the link, until it is closed."""
        async for event in self._link:
            self._on_event(event)

    async def submit(self, submission: Submission) -> RemoteStream:
        """Send a submission with its features, and wait until the worker has taken it."""
        if not self._link.takes_submits:
            raise NotReady(f"{self._reason}; try again in a moment")
        sequences = submission.sampling.get("n", 1)
        assert isinstance(sequences, int)
        stream = RemoteStream(submission.request_id, self, sequences=sequences)
        self._streams[submission.request_id] = stream
        try:
            self._send(submission, stream)
            await stream.until_accepted()
        except BaseException:
            await stream.close()
            raise
        return stream

    def _send(self, submission: Submission, stream: RemoteStream) -> None:
        """Send all of a submission, in one session: nothing is awaited."""
        self._link.send(
            submit_of(
                submission.request_id,
                submission.prompt,
                sampling=submission.sampling,
                cache_salt=submission.cache_salt,
                payloads=submission.features,
            )
        )
        for digest, feature in submission.features.items():
            stream.transfers.append(self._link.send_feature(digest, feature))

    def abort(self, request_id: str, transfers: list[Transfer]) -> None:
        """Let the worker know that nobody waits for a request."""
        if self._link.is_open:
            self._link.send(Abort(request_id))
            for transfer in transfers:
                self._link.withdraw(transfer)

    def forget(self, request_id: str) -> None:
        """Drop what still comes for a request."""
        self._streams.pop(request_id, None)

    async def reset(self) -> None:
        """Not over a link yet: a worker's caches are reset at its admin address."""
        raise ProtocolError("a frontend cannot reset a worker")

    async def close(self) -> None:
        """Nothing to do: the link is its owner's, and the worker's engine goes on."""

    def _on_event(self, event: Event) -> None:
        match event:
            case Opened(contract):
                self._become(contract, "")
            case Accepted() | Delta() | Failed():
                if (stream := self._streams.get(event.request_id)) is not None:
                    stream.on_message(event)
            case Draining():
                self._become(None, "the worker is shutting down")
            case Closed() | Reset():
                self._become(None, f"no worker ({event.message})")
                for stream in list(self._streams.values()):
                    stream.fail(WorkerLost("the worker was lost while it answered; send the request again"))
            case Load(running=running):
                self.running = running
            case _:
                raise ProtocolError(f"{type(event).__name__} is nothing for a frontend")

    def _become(self, contract: Contract | None, reason: str) -> None:
        self._contract, self._reason = contract, reason
        self._changed.set()
