"""The worker's loop: submissions in, answers out, and announcements of what the engine holds.

Each request is a task. It waits in the intake until the features that its frontend has sent are there, asks for those
that turn out to be missing, and lets all of them go when the engine has taken the submission. It is cancelled when its
frontend aborts it, leaves, or is lost; cancelling closes the stream, and that aborts the request in the engine.
The ledger depends on two rules. A request is opened and closed in the intake in the same step in which its messages are
read and sent. Updates go to the frontend of a request before any message about it, so a frontend that reads "accepted"
knows what is held; the others get them a little later (`cache_updates`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Generator, Iterable, Iterator
from dataclasses import replace
from typing import Final

from msgspec import UNSET, structs

from semel.aio import in_slices
from semel.cache import Borrower
from semel.core import Digest, Feature, Output, Submission
from semel.engine import Engine, EngineAdapters, Stream
from semel.engine.observed import Observed
from semel.errors import (
    EngineDead,
    EngineFailed,
    EngineHung,
    FeatureMissing,
    ProtocolError,
    RequestError,
    SemelError,
    ServiceError,
)
from semel.ledger import Intake
from semel.telemetry import metrics
from semel.telemetry.meter import Sample
from semel.telemetry.request_context import current_span, spanning, tell_fault
from semel.telemetry.spans import NO_TRACING, Tracing, span_trace
from semel.wire.events import Admitted, Arrived, Closed, Event, Reset
from semel.wire.messages import (
    Abort,
    Accepted,
    Adapters,
    ChangeAdapter,
    Drain,
    Draining,
    Failed,
    Forget,
    Lend,
    Need,
    Submit,
    ToFrontend,
)
from semel.wire.outputs import to_delta, to_deltas
from semel.wire.zmq import Peer, WorkerListener
from semel.worker.adapter_changes import AdapterChanges
from semel.worker.assembling import assemble, borrow
from semel.worker.cache_updates import CacheUpdates, Load
from semel.worker.progress_watch import until_hung
from semel.worker.publisher import Publisher
from semel.worker.requests import Request, abort_waiting, request_ids, tasks_of
from semel.worker.turns import EngineTurns

__all__ = ["Worker"]

_FEATURES_S: Final = 120.0
"""Seconds that a request waits for features before it fails."""

_SETTLE_S: Final = 0.1
"""Seconds that a draining worker stays at least: requests that were under way to it are answered too."""

_MAX_SUBMISSIONS: Final = 3
"""Of one request to the engine, which may turn out to have lost what it held."""

Submitting = Callable[[Submission], Awaitable[Stream]]
"""A function that submits to the engine: `Engine.submit`, or one that does more before it."""

logger = logging.getLogger(__name__)


class Worker:
    """A server of one engine for the frontends of a listener."""

    def __init__(
        self,
        engine: Engine,
        listener: WorkerListener,
        borrowers: Borrower | None = None,
        *,
        tracing: Tracing = NO_TRACING,
        turns: EngineTurns | None = None,
        progress_s: float = 0.0,
        submit: Submitting | None = None,
        updates: CacheUpdates[Peer] | None = None,
        adapters: EngineAdapters | None = None,
    ) -> None:
        self.needs = 0
        """Features that were asked for."""

        self.resubmissions = 0
        self._running = 0
        self._engine = engine
        self._submitting = submit
        self._listener = listener
        self._borrowers = borrowers
        self._tracing = tracing
        self._turns = EngineTurns() if turns is None else turns
        self._frontends: dict[Peer, dict[str, Request]] = {}
        self._intake: Intake[Peer] = Intake()
        self._publisher = Publisher(listener, CacheUpdates() if updates is None else updates)
        self._progress_s = progress_s
        """Seconds that the engine may be busy without a step; 0 for no limit."""

        self._died = asyncio.Event()
        self._hung = ""
        """Why the engine counts as hung, if it does."""

        self._leaving = self._draining = self._is_paused = False
        engine.watch(self._publisher)
        self._adapters, self._adapter_changes = adapters, None if adapters is None else AdapterChanges(adapters)
        if adapters is not None:
            adapters.watchers.append(self._tell_adapters)

    async def run(self) -> None:
        """Serve until the listener is closed; raise `EngineDead` as soon as the engine is, `EngineHung` if it hangs."""
        serving = asyncio.create_task(self._serve())
        dying = asyncio.create_task(self._died.wait())
        watching = asyncio.create_task(self._watch_progress())
        try:
            await asyncio.wait({serving, dying, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
            if not serving.done():
                raise self._end_sessions()
            serving.result()
        finally:
            for task in (serving, dying, watching):
                task.cancel()
            for peer in list(self._frontends):
                self._forget(peer)
            self._publisher.stop()
            if self._adapter_changes is not None:
                self._adapter_changes.stop()

    def leave(self) -> None:
        """Count as not ready, for good; requests are taken until it drains."""
        self._leaving = True

    async def drain(self, within_s: float) -> None:
        """Let frontends know that nothing more is taken, and wait for what is running, but not for ever."""
        self._draining = True
        self._listener.broadcast(Draining())
        settled = asyncio.get_running_loop().time() + _SETTLE_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while (running := set(self._tasks())) or asyncio.get_running_loop().time() < settled:
                    await (asyncio.wait(running) if running else asyncio.sleep(_SETTLE_S))

    @property
    def reason(self) -> str:
        """Why it takes no requests; empty if it does."""
        if self._died.is_set():
            return self._hung or "the engine has died"
        return "the worker is shutting down" if self._leaving or self._draining else ""

    async def reset(self) -> None:
        """Forget everything that is cached, here and at the frontends; requests in flight are answered."""
        try:
            await self._engine.reset()
        except EngineDead:
            self._died.set()
            raise
        self._publisher.publish()
        self._listener.broadcast(Forget())

    def set_paused(self, is_paused: bool) -> None:
        """Tell frontends whether the engine makes no steps on purpose: others get the next requests, if there are any.

        A request that comes all the same waits in the engine.
        """
        self._is_paused = is_paused
        self._tell_load()

    def request_ids(self, among: Collection[str] = ()) -> set[str]:
        """Return the ids of the requests that are being answered: all, or those among some."""
        return request_ids(self._frontends.values(), among)

    def abort_waiting(self, request_ids: Collection[str]) -> set[str]:
        """End those of the requests that the engine does not have yet, as it ends others; returns their ids."""
        return abort_waiting(self._frontends.values(), request_ids)

    def samples(self) -> Iterator[Sample]:
        """Yield samples of its metrics."""
        for generation, count in self._listener.generations.items():
            yield metrics.FRONTEND_SESSIONS, count, (str(generation),)
        for code, count in self._listener.refused.items():
            yield metrics.SESSIONS_REFUSED, count, (code,)
        yield metrics.NEEDS, self.needs, ()
        yield metrics.RESUBMISSIONS, self.resubmissions, ()
        yield metrics.INTAKE_BYTES, self._intake.nbytes, ()
        yield metrics.MM_CACHE_ITEMS, len(self._publisher.holdings), ("worker",)
        yield metrics.MM_CACHE_BYTES, self._publisher.holdings.nbytes, ("worker",)
        yield metrics.MM_CACHE_CAPACITY, self._engine.contract.cache_bytes, ("worker",)
        yield from self._turns.samples()
        yield metrics.ENGINE_PAUSED, float(self._is_paused), ()
        yield metrics.ENGINE_STEPS, self._engine.progress.steps, ()
        yield metrics.ENGINE_WAITED_SECONDS, self._engine.progress.waited_s, ()
        yield from self._tracing.samples()

    async def _watch_progress(self) -> None:
        self._hung = await until_hung(self._engine, self._progress_s)
        self._died.set()

    def _end_sessions(self) -> EngineDead:
        """Let frontends know how the engine ended; returns that as an error."""
        error = EngineHung(self._hung) if self._hung else EngineDead("the engine has died; its log says why")
        for peer in self._frontends:
            self._listener.close(peer, str(error), code=error.code)
        return error

    async def _serve(self) -> None:
        async for peer, event in self._listener:
            if peer not in self._frontends and not isinstance(event, Admitted):
                continue  # it was dismissed, and this was on its way
            try:
                self._on_event(peer, event)
            except ProtocolError as error:
                self._dismiss(peer, str(error))
            except Exception:  # an edge: what one frontend sends must not end the others
                logger.exception("an event of %s failed", peer)

    def _on_event(self, peer: Peer, event: Event) -> None:
        match event:
            case Admitted(resume=resume):
                self._admit(peer, None if resume is None else resume.number)
            case Submit():
                self._begin(peer, event)
            case Arrived(digest, feature):
                self._wake(peer, self._intake.arrive(peer, digest, feature))
            case Lend():
                self._borrow(peer, event)
            case Abort(request_id=request_id):
                self._abort(peer, request_id)
            case Closed() | Reset():
                self._forget(peer)
                logger.info("frontend %s is gone: %s", peer.frontend_id, event.message)
            case ChangeAdapter():
                self._change_adapter(event)
            case Drain():
                logger.info("frontend %s sends nothing more", peer.frontend_id)
            case _:
                raise ProtocolError(f"{type(event).__name__} is nothing for a worker")

    def _admit(self, peer: Peer, known: int | None) -> None:
        self._frontends[peer] = {}
        if self._adapters is not None:
            self._send(peer, self._announcement())  # those in the contract may have changed during the handshake
        self._publisher.join(peer, known)
        logger.info("frontend %s connected", peer.frontend_id)
        if self._draining:
            self._send(peer, Draining())

    def _tell_adapters(self) -> None:
        """Tell frontends which adapters the engine has now, and why."""
        announced = self._announcement()
        self._listener.contract = replace(self._listener.contract, adapters=announced.adapters)
        self._listener.broadcast(announced)

    def _announcement(self) -> Adapters:
        loaded = self._engine.contract.adapters
        changes = () if self._adapters is None else tuple(self._adapters.changes)
        return Adapters(() if loaded is UNSET else loaded, changes)

    def _change_adapter(self, message: ChangeAdapter) -> None:
        if self._adapter_changes is None:
            raise ProtocolError("the worker takes no adapters")
        self._adapter_changes.take(message.change)

    def _begin(self, peer: Peer, submit: Submit) -> None:
        requests = self._frontends[peer]
        request_id = submit.request_id
        if request_id in requests:
            raise ProtocolError(f"request {request_id} was submitted twice")
        digests = [place.digest for place in submit.places]
        try:
            opened = self._intake.open(peer, request_id, digests, submit.payloads, self._engine.holds)
        except ProtocolError as error:
            self._fail(peer, request_id, error)
            return
        requests[request_id] = request = Request()
        request.task = task = asyncio.create_task(self._answer(peer, submit, request))
        self._running += 1
        self._ask(peer, request_id, opened.needed)
        self._tell_load()

        def end(_: asyncio.Task[None]) -> None:
            # A cancelled task keeps its traceback, whose frames have this request: a cycle, which would hold features.
            request.task = None
            self._intake.close(peer, request_id)
            requests.pop(request_id, None)
            if request.turn is not None:
                self._turns.release(request.turn)
            self._running -= 1
            self._tell_load()

        task.add_done_callback(end)

    async def _answer(self, peer: Peer, submit: Submit, request: Request) -> None:
        """Answer a request, in a span of its own: from its submission to its last token."""
        request_id = submit.request_id
        with spanning(self._tracing, "generate", request_id, submit.trace):
            try:
                await self._generate(peer, submit, request)
            except asyncio.CancelledError:
                if not request.is_aborted:
                    raise
                self._end_aborted(peer, submit)
            except SemelError as error:
                self._fail(peer, request_id, error)
            except Exception:  # the edge of the process: one request must not end the others
                logger.exception("a request failed in a way that we do not expect")
                self._fail(peer, request_id, ServiceError("the worker failed on this request; its log says why"))
            finally:
                if request.observed is not None:
                    request.observed.end()

    async def _generate(self, peer: Peer, submit: Submit, request: Request) -> None:
        """Send the engine's outputs. A submission is repeated if the engine had lost an item that it should hold."""
        for _ in range(_MAX_SUBMISSIONS):
            stream = await self._submit(peer, submit, request)
            is_complete, request.is_submitted = False, True
            try:
                features = dict(self._intake.features(peer, submit.request_id))
                self._intake.close(peer, submit.request_id)
                self._publisher.tell(peer)
                if peer in self._frontends:
                    self._listener.send_lazily(peer, Accepted(submit.request_id))
                current_span().add_event("accepted")
                if features:
                    await in_slices(_let_go(features))
                async for output in stream:
                    await self._send_output(peer, submit.request_id, request, output)
                is_complete = True
            except FeatureMissing as error:  # before the first output
                logger.warning("the engine had lost %d items of a request", len(error.digests))
                self.resubmissions += 1
                request.is_submitted = False
                submit = structs.replace(submit, client_features=())  # they are counted
                digests = [place.digest for place in submit.places]
                opened = self._intake.reopen(peer, submit.request_id, digests, map(Digest, error.digests))
                self._ask(peer, submit.request_id, opened.needed)
            else:
                return
            finally:
                closing = stream.close()
                # A second cancellation must not lose the abort; of a complete answer there is none.
                await (closing if is_complete else asyncio.shield(closing))
        raise EngineFailed("the engine lost items of the request again and again; send it again")

    def _end_aborted(self, peer: Peer, submit: Submit) -> None:
        """End a request that the engine never had as vLLM ends one: each of its answers says `abort`."""
        self._intake.close(peer, submit.request_id)
        self._send(peer, Accepted(submit.request_id))
        for index in range(submit.sampling.get("n") or 1):
            self._send(peer, to_delta(submit.request_id, Output(index, "", (), finish_reason="abort")))

    async def _send_output(self, peer: Peer, request_id: str, request: Request, output: Output) -> None:
        if request.turn is not None:
            self._turns.count(request.turn, output)
        if request.observed is not None:
            request.observed.take(output)
        for delta in to_deltas(request_id, output):
            await self._listener.until_room(peer)  # or one long answer would end everybody's session
            self._send(peer, delta)

    async def _submit(self, peer: Peer, submit: Submit, request: Request) -> Stream:
        """Hand a submission to the engine as soon as all it needs is there."""
        while True:
            await self._until_ready(peer, submit.request_id, request)
            features = self._intake.features(peer, submit.request_id)
            try:
                submission = await assemble(submit, features, self._engine, span_trace(current_span()))
                if request.observed is None and (span := current_span()).is_recording():
                    request.observed = Observed.begin(span, submission, self._engine.contract.model)
                if request.turn is None:
                    submission = await self._engine.prepare(submission)  # who waits for that takes no place
                    request.turn = await self._turns.take(submission)
                return await (self._submitting or self._engine.submit)(submission)
            except FeatureMissing as error:
                missing = self._intake.missing(peer, submit.request_id, map(Digest, error.digests))
                self._ask(peer, submit.request_id, missing)

    async def _until_ready(self, peer: Peer, request_id: str, request: Request) -> None:
        if self._intake.is_ready(peer, request_id):
            return
        try:
            async with asyncio.timeout(_FEATURES_S):
                while not self._intake.is_ready(peer, request_id):
                    request.ready.clear()
                    await request.ready.wait()
        except TimeoutError:
            raise ServiceError(f"the features of the request did not come within {_FEATURES_S:g} s") from None

    def _ask(self, peer: Peer, request_id: str, digests: tuple[Digest, ...]) -> None:
        if digests:
            self.needs += len(digests)
            self._publisher.tell(peer)
            self._send(peer, Need(request_id, digests))

    def _borrow(self, peer: Peer, lend: Lend) -> None:
        """Read a feature in a frontend's shared memory, as long as anyone here needs it."""
        try:
            feature = borrow(self._borrowers, lend)
        except ProtocolError as error:
            self._dismiss(peer, f"what was lent cannot be read: {error}")
            return
        self._wake(peer, self._intake.arrive(peer, lend.digest, feature))

    def _dismiss(self, peer: Peer, message: str) -> None:
        """End a session whose frontend broke a rule; it opens another, and knows what was lost."""
        logger.warning("frontend %s broke the protocol: %s", peer.frontend_id, message)
        self._listener.close(peer, message)
        self._forget(peer)

    def _wake(self, peer: Peer, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if (request := self._frontends[peer].get(request_id)) is not None:
                request.ready.set()

    def _fail(self, peer: Peer, request_id: str, error: SemelError) -> None:
        if isinstance(error, EngineDead):
            self._died.set()
        reported = error if isinstance(error, (RequestError, ServiceError)) else ServiceError(str(error))
        tell_fault(reported)
        self._intake.close(peer, request_id)
        self._publisher.tell(peer)
        self._send(peer, Failed(request_id, reported.status, reported.code, str(reported)))

    def _abort(self, peer: Peer, request_id: str) -> None:
        self._intake.close(peer, request_id)
        if (request := self._frontends[peer].get(request_id)) is not None and request.task is not None:
            request.task.cancel()

    def _forget(self, peer: Peer) -> None:
        self._publisher.leave(peer)
        for request in list(self._frontends.pop(peer, {}).values()):
            if request.task is not None:
                request.task.cancel()
        self._intake.forget(peer)

    def _send(self, peer: Peer, message: ToFrontend) -> None:
        """Send to a frontend, if it is still there."""
        if peer in self._frontends:
            self._listener.send(peer, message)

    def _tell_load(self) -> None:
        """Let frontends know how busy the engine is."""
        waiting = self._intake.waiting
        self._publisher.set_load(Load(max(0, self._running - waiting), waiting, self._is_paused))

    def _tasks(self) -> Iterator[asyncio.Task[None]]:
        return tasks_of(self._frontends.values())


def _let_go(features: dict[Digest, Feature]) -> Generator[None, None, None]:
    """Drop the last references to features, in slices: thousands take longer than others can wait."""
    while features:
        features.popitem()
        yield
