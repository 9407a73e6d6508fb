"""The worker's loop: submissions in, answers out.

Each request is a task. It keeps its features only until the engine has taken the submission, and it is cancelled when
its frontend aborts it, leaves, or is lost; cancelling closes the stream, and that aborts the request in the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from semel.engine import Engine, Output, Submission
from semel.errors import EngineDead, ProtocolError, RequestError, SemelError, ServiceError
from semel.wire.events import Admitted, Arrived, Closed, Event, Reset
from semel.wire.messages import Abort, Accepted, Delta, Drain, Draining, Failed, Load, Submit
from semel.wire.translation import prompt_of
from semel.wire.zmq import Peer, WorkerListener
from semel.worker.inbox import Announced, Inbox

__all__ = ["Worker"]

_LOAD_S: Final = 0.02

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Frontend:
    """What is under way for one frontend."""

    inbox: Inbox = field(default_factory=Inbox)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)


class Worker:
    """Serves an engine to the frontends of a listener."""

    def __init__(self, engine: Engine, listener: WorkerListener) -> None:
        self._engine = engine
        self._listener = listener
        self._frontends: dict[Peer, _Frontend] = {}
        self._died = asyncio.Event()
        self._draining = False
        self._telling: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Serve until the listener is closed; raise `EngineDead` as soon as the engine is."""
        serving = asyncio.create_task(self._serve())
        dying = asyncio.create_task(self._died.wait())
        try:
            await asyncio.wait({serving, dying}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                raise EngineDead("the engine has died; its log says why")
            serving.result()
        finally:
            serving.cancel()
            dying.cancel()
            for peer in list(self._frontends):
                self._forget(peer)
            if self._telling is not None:
                self._telling.cancel()

    async def drain(self, within_s: float) -> None:
        """Let frontends know that nothing more is taken, and wait for what is running, but not for ever."""
        self._draining = True
        self._listener.broadcast(Draining())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while (running := set(self._tasks())) or any(len(one.inbox) for one in self._frontends.values()):
                    await asyncio.wait(running or {asyncio.create_task(asyncio.sleep(_LOAD_S))})

    async def _serve(self) -> None:
        async for peer, event in self._listener:
            try:
                self._on_event(peer, event)
            except ProtocolError as error:
                logger.warning("%s broke the protocol: %s", peer, error)
            except Exception:  # an edge: what one frontend sends must not end the others
                logger.exception("an event of %s failed", peer)

    def _on_event(self, peer: Peer, event: Event) -> None:
        match event:
            case Admitted():
                self._frontends[peer] = _Frontend()
                logger.info("frontend %s connected", peer.frontend_id)
                if self._draining:
                    self._send(peer, Draining())
                self._tell_load()
            case Submit():
                self._announce(peer, event)
            case Arrived(digest, feature):
                for submission in self._frontends[peer].inbox.arrive(digest, feature):
                    self._begin(peer, submission)
            case Abort(request_id=request_id):
                self._abort(peer, request_id)
            case Closed() | Reset():
                self._forget(peer)
                logger.info("frontend %s is gone: %s", peer.frontend_id, event.message)
            case Drain():
                logger.info("frontend %s sends nothing more", peer.frontend_id)
            case _:
                raise ProtocolError(f"{type(event).__name__} is nothing for a worker")

    def _announce(self, peer: Peer, submit: Submit) -> None:
        frontend = self._frontends[peer]
        if submit.request_id in frontend.tasks:
            self._fail(peer, submit.request_id, ProtocolError(f"request {submit.request_id} was submitted twice"))
            return
        try:
            announced = Announced(
                submit.request_id, prompt_of(submit), submit.sampling, submit.cache_salt, frozenset(submit.payloads)
            )
            complete = frontend.inbox.announce(announced)
        except ProtocolError as error:
            self._fail(peer, submit.request_id, error)
            return
        if complete is not None:
            self._begin(peer, complete)

    def _begin(self, peer: Peer, submission: Submission) -> None:
        tasks = self._frontends[peer].tasks
        request_id = submission.request_id
        task = asyncio.create_task(self._answer(peer, submission))
        tasks[request_id] = task
        self._tell_load()

        def end(_: asyncio.Task[None]) -> None:
            tasks.pop(request_id, None)
            self._tell_load()

        task.add_done_callback(end)

    async def _answer(self, peer: Peer, submission: Submission) -> None:
        request_id = submission.request_id
        try:
            stream = await self._engine.submit(submission)
            del submission
            try:
                self._send(peer, Accepted(request_id))
                async for output in stream:
                    self._send(peer, _delta(request_id, output))
            finally:
                await asyncio.shield(stream.close())  # a second cancellation must not lose the abort
        except SemelError as error:
            self._fail(peer, request_id, error)
        except Exception:  # the edge of the process: one request must not end the others
            logger.exception("request %s failed", request_id)
            self._fail(peer, request_id, ServiceError("the worker failed on this request; its log says why"))

    def _fail(self, peer: Peer, request_id: str, error: SemelError) -> None:
        if isinstance(error, EngineDead):
            self._died.set()
        told = error if isinstance(error, (RequestError, ServiceError)) else ServiceError(str(error))
        self._send(peer, Failed(request_id, told.status, told.code, str(told)))

    def _abort(self, peer: Peer, request_id: str) -> None:
        frontend = self._frontends[peer]
        if not frontend.inbox.abort(request_id) and (task := frontend.tasks.get(request_id)) is not None:
            task.cancel()

    def _forget(self, peer: Peer) -> None:
        frontend = self._frontends.pop(peer, _Frontend())
        for task in list(frontend.tasks.values()):
            task.cancel()

    def _send(self, peer: Peer, message: Accepted | Delta | Failed | Draining) -> None:
        """Send to a frontend, if it is still there."""
        if peer in self._frontends:
            self._listener.send(peer, message)

    def _tell_load(self) -> None:
        """Let every frontend know soon how busy the engine is: once for all that changes in a moment."""
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(_LOAD_S, self._broadcast_load)

    def _broadcast_load(self) -> None:
        self._telling = None
        waiting = sum(len(frontend.inbox) for frontend in self._frontends.values())
        self._listener.broadcast(Load(sum(1 for _ in self._tasks()), waiting))

    def _tasks(self) -> Iterator[asyncio.Task[None]]:
        for frontend in self._frontends.values():
            yield from frontend.tasks.values()


def _delta(request_id: str, output: Output) -> Delta:
    logprobs = None if output.logprobs is None else tuple(dict(step) for step in output.logprobs)
    return Delta(request_id, output.index, output.text, output.token_ids, output.finish_reason, logprobs)
