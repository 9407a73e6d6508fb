"""A worker as its frontend sees it: its items, its load, and a way to submit to it.

Of a request's items only those travel that the worker lacks: the ledger says which, and sending them and noting it are
one step. All of it goes into the session that the ledger speaks of: that whose opening was read last. The link may have
replaced it meanwhile; then the request goes to another worker, and none is left that generates for nobody. A wrong
guess is repaired here, before and after the worker has taken the request, and the client never sees it. What was made
for a request is let go when the worker has taken it, its media with the first output.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextvars import Context
from typing import Final

from msgspec import UNSET

from semel.cache import SharedCache
from semel.core import (
    Adapter,
    AdapterChange,
    Contract,
    Digest,
    Feature,
    FeatureInfo,
    LatestChanges,
    Submission,
)
from semel.errors import EngineDead, EngineHung, InvalidRequest, NotReady, ProtocolError, SemelError, ServiceError
from semel.fleet.compatibility import RefusalReason, first_difference
from semel.fleet.lending import Lending
from semel.fleet.retry_policy import RetryPolicy
from semel.fleet.stream import RemoteStream, lost
from semel.ledger import Directory, Ledger
from semel.render import MakeFeature
from semel.telemetry import CacheLookups, Meter, metrics
from semel.wire.events import Closed, Event, Reset
from semel.wire.keys import TransportKeys
from semel.wire.messages import (
    Abort,
    Accepted,
    Adapters,
    ChangeAdapter,
    Delta,
    Draining,
    Failed,
    Forget,
    Need,
    Pooled,
    Resume,
    Status,
)
from semel.wire.translation import to_announcement, to_submit
from semel.wire.zmq import Connected, FrontendLink, LinkSession

__all__ = ["RemoteWorker"]

_STARTING: Final = "the worker is starting"
_GONE: Final = "no worker is connected"
_HUNG: Final = "engine_hung: the worker's engine made no progress, and is being replaced"
# The codes of a session's end that mean the end of an engine, as far as one can see from here, or a refusal.
_DEATHS: Final = frozenset((EngineDead.code, EngineHung.code, "gone", "silence"))
_REFUSALS: Final[Mapping[str, RefusalReason]] = {"key": "key", "protocol": "protocol"}
_REMEMBER_S: Final = 60.0

# Events that are taken in before others have their turn: with 2,000 streams an engine's step brings as many at once,
# and each wakes a stream, which takes about 35 µs. Without turns the loop is late by all of a step's work.
_TURN: Final = 64

logger = logging.getLogger(__name__)


class RemoteWorker:
    """The worker at the other end of a link."""

    def __init__(
        self,
        link: FrontendLink,
        *,
        memory: SharedCache | None = None,
        lookups: CacheLookups | None = None,
        meter: Meter | None = None,
        on_forget: Callable[[], None] | None = None,
    ) -> None:
        self.name = link.address
        self.generation = 0  # of the transport keys that its last session was opened with
        self.incarnation = b""  # of the worker's process, as of its last session
        self.sessions = 0  # that there have been with it: behind each may be another engine
        self._link = link
        link.resume = self._resume
        self._lending = Lending(memory, link.address)
        self._ledger = Ledger()
        self._lookups = lookups or CacheLookups()
        self._meter = meter or Meter()
        self._on_forget = on_forget
        self._contract: Contract | None = None
        self.reason = _STARTING  # why it takes no requests; empty if it does
        self._refusal: RefusalReason | None = None  # of the last try: the protocol's version or the fleet key
        self._last_loss = ""  # it tries again and again, and is lost for the same reason each time: one line in the log
        self._session: LinkSession | None = None  # that of the ledger, from the event of its opening to that of its end
        self._was_hung = False
        self.is_paused = False  # its engine makes no steps on purpose: what is submitted waits there
        self.adapters: tuple[Adapter, ...] = ()  # that its engine has
        self.adapter_changes: tuple[AdapterChange, ...] = ()  # that it knows
        self._announced_changes: LatestChanges | None = None  # these, and what it was sent; None until it has said any
        self._forgetting: asyncio.TimerHandle | None = None  # until then a lost worker may come back, and go on
        self.on_change: Callable[[], None] = lambda: None  # called at once whenever the worker comes or goes
        self.on_load: Callable[[], None] = lambda: None  # called whenever its load may have changed
        self.on_adapters: Callable[[], None] = lambda: None  # called whenever its adapters are others
        self._streams: dict[str, RemoteStream] = {}
        self._unanswered: set[str] = set()  # of these, the requests that the worker is busy with, or about to be
        self._others = 0  # requests of other frontends: the worker's last status without ours of that moment
        self._idle = asyncio.Event()
        self._settled = asyncio.Event()
        self._transfers: dict[Digest, list[int]] = {}  # in frames, to be withdrawn when nobody counts on them any more
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_connected(self) -> bool:
        """Return whether there is a worker at the other end that takes requests."""
        return self._contract is not None

    @property
    def load(self) -> int:
        """The requests that it is answering or about to: ours as we know them, those of others by its last status."""
        return self._others + len(self._unanswered)

    @property
    def refusal(self) -> RefusalReason | None:
        """The reason why there is no session, if one of us has refused it."""
        return None if self.is_connected else self._refusal

    @property
    def contract(self) -> Contract:
        """The contract of the worker's engine."""
        if self._contract is None:
            raise NotReady(f"{self.reason}; try again in a moment")
        return self._contract

    def knows(self, digest: Digest) -> bool:
        """Return whether the worker holds an item, or has just been sent it."""
        return self._ledger.knows(digest)

    def holding(self, digest: Digest) -> FeatureInfo | None:
        """Return what the worker has announced of an item."""
        return self._ledger.holding(digest)

    @property
    def adapter_session(self) -> object | None:
        """Something that is another for each session with an engine that takes adapters; None of other engines."""
        return self._announced_changes

    def follow(self, changes: Iterable[AdapterChange]) -> None:
        """Pass on what other workers were asked for, unless this one knows: each change once in a session."""
        session, announced = self._session, self._announced_changes
        for change in changes:
            if announced is None or session is None or not session.takes_submits:
                return  # the last message may have ended the session, by an overrun
            if announced.note(change):
                session.send(ChangeAdapter(change))

    def enter(self, directory: Directory) -> int:
        """Let a directory know from now on which items the worker has. Returns the worker's number there."""
        self._ledger.move(directory)
        return self._ledger.number

    async def until_settled(self) -> None:
        """Wait until it is connected and has announced its items, which it does before its load."""
        await self._settled.wait()

    def replace_keys(self, keys: TransportKeys) -> None:
        """Use other keys from now on; a session whose keys are not among them ends."""
        self._link.replace_keys(keys)

    def take_over(self, before: RemoteWorker) -> None:
        """Be the same worker as one over an older link. Any accepted keys will do from now on.

        What is lent is not of a session: it goes on.
        """
        self.sessions = max(self.sessions, before.sessions)  # the engine is the same
        self._link.newest_only = False
        if not self._lending.take_over(before._lending):
            self._begin(self._lending.begin())

    async def until_idle(self) -> None:
        """Wait until no answer comes from it."""
        while self._streams:
            self._idle.clear()
            await self._idle.wait()

    async def run(self) -> None:
        """Take in what comes over the link, until it is closed."""
        try:
            count = 0
            async for event in self._link:
                if (count := count + 1) % _TURN == 0 or (isinstance(event, Status) and len(event.items) > _TURN):
                    await asyncio.sleep(0)
                try:
                    if isinstance(event, Delta):  # one for each token, so it takes the shortest way
                        self._on_delta(event)
                    else:
                        await self._on_event(event)
                except ProtocolError as error:  # one worker's fault must not end the others' service
                    logger.warning("the worker at %s broke the protocol: %s", self.name, error)
                    self._reset(str(error))
                except Exception:  # an edge: nor must ours, in what we make of one worker's message
                    logger.exception("an event of the worker at %s failed: its session is opened anew", self.name)
                    self._reset("the frontend failed on a message; its log says why")
                del event  # or a thousand idle links keep a slice of a snapshot each
        finally:
            for task in self._tasks:
                task.cancel()
            self._lending.stop()
            if self._forgetting is not None:
                self._forgetting.cancel()

    async def submit(
        self, submission: Submission, make: MakeFeature, *, watcher: RetryPolicy | None = None
    ) -> RemoteStream:
        """Send a submission with what the worker lacks of it, and wait until the worker has taken it."""
        stream = RemoteStream(submission, make, self, watcher)
        items = submission.prompt.items
        digests = [item.digest for item in items] if items else []
        while digests and (lacking := self._lacking(stream, digests)):
            for digest in lacking:  # it was held when the prompt was rendered, and is gone meanwhile
                await stream.feature(digest)
        session = self._session_for(stream)
        self._streams[submission.request_id] = stream
        try:
            self._send(session, submission, digests, stream)
            await stream.until_accepted()
        except BaseException:
            await stream.close()
            raise
        return stream

    def _lacking(self, stream: RemoteStream, digests: Iterable[Digest]) -> list[Digest]:
        """Return what neither the worker nor the request has."""
        return [one for one in dict.fromkeys(digests) if not (self.knows(one) or one in stream.features)]

    def _session_for(self, stream: RemoteStream) -> LinkSession:
        """Return the session to submit in. It may not be the one that there was when the request was begun."""
        session = self._session
        if session is None or not session.takes_submits or self._contract is None:
            raise NotReady(f"{self.reason or 'the worker has left'}; try again in a moment")
        if self._contract is not stream.contract and first_difference(stream.contract, self._contract) is not None:
            raise NotReady("the worker has another engine now; try again in a moment")
        return session

    def _send(self, session: LinkSession, submission: Submission, digests: list[Digest], stream: RemoteStream) -> None:
        """Send all of a submission, in one session: nothing is awaited."""
        payloads = self._ledger.submit(submission.request_id, digests) if digests else ()
        self._unanswered.add(submission.request_id)
        self.on_load()
        try:
            session.send(to_submit(submission, payloads))
        except ProtocolError as error:  # the session is open, so it is the message
            raise InvalidRequest(f"the request does not fit into one message: {error}; send a smaller one") from error
        if payloads:
            self._send_features(session, stream, {digest: stream.features[digest] for digest in payloads})
        for digest in set(digests) - stream.sent:
            if (holding := self.holding(digest)) is not None:
                self._meter.count(metrics.FEATURE_BYTES_SAVED, amount=holding.nbytes)

    def _send_features(self, session: LinkSession, stream: RemoteStream, features: Mapping[Digest, Feature]) -> None:
        """Send features of a request, unless its messages end the session, by an overrun: that breaks the stream off,
        and another worker gets the request."""
        for digest, feature in features.items():
            if not session.is_open:
                return
            self._send_feature(session, stream, digest, feature)

    def _send_feature(self, session: LinkSession, stream: RemoteStream, digest: Digest, feature: Feature) -> None:
        stream.sent.add(digest)
        if (lend := self._lending.lend(digest, feature)) is not None:
            session.send(lend)
        else:
            self._transfers.setdefault(digest, []).append(session.send_feature(digest, feature))
        way = "frames" if lend is None else "memory"
        self._meter.count(metrics.FEATURES_SENT, way)
        self._meter.count(metrics.FEATURE_BYTES_SENT, way, amount=feature.nbytes)

    def abort(self, stream: RemoteStream) -> None:
        """Let the worker know that nobody waits for a request."""
        if self._session is not None and self._session.is_open:
            self._session.send(Abort(stream.request_id))
        self._settle(stream.request_id)
        self._note_answered(stream)

    def forget(self, stream: RemoteStream) -> None:
        """Drop what still comes for a request, and count its items: what had to travel for them is known now."""
        if self._streams.pop(stream.request_id, None) is not None:
            if stream.items:
                self._settle(stream.request_id)
            self._unanswered.discard(stream.request_id)
            self.on_load()
            if not self._streams:
                self._idle.set()
            if stream.items and stream.contract.cache_bytes and not stream.goes_on_elsewhere:
                for modality, count, hit in stream.lookups():
                    self._lookups.count(stream.contract.model, modality, "worker", count, hit)

    def _reset(self, message: str) -> None:
        """End the session whose event was at fault, and no other."""
        if self._session is not None:
            self._session.reset(message)

    async def _on_event(self, event: Event | Connected) -> None:
        match event:
            case Connected():
                await self._open(event)
            case Draining():
                self._become(None, "the worker is shutting down")
            case Closed() | Reset():
                self._lose(event)
            case Status():
                self._take_status(event)
            case Accepted() | Failed() | Need():
                self._on_answer(event)
            case Pooled():
                self._on_delta(event)
            case Adapters():
                self._take_adapters(event)
            case Forget():
                if self._on_forget is not None:
                    self._on_forget()
            case _:
                raise ProtocolError(f"{type(event).__name__} is nothing for a frontend")

    async def _open(self, connected: Connected) -> None:
        self.sessions += 1
        self.generation = connected.generation
        self.incarnation = connected.incarnation
        self._was_hung = self.is_paused = False
        if self._forgetting is not None:
            self._forgetting.cancel()
            self._forgetting = None
        self._ledger.open(connected.incarnation)
        self._session = connected.session
        if not self._link.newest_only:  # else it is lent to over the older link, until this one takes over
            await self._lending.begin()
        self._last_loss = ""
        self.adapters = () if (adapters := connected.contract.adapters) is UNSET else adapters
        self.adapter_changes, self._announced_changes = (), None
        self._become(connected.contract, "")

    def _take_status(self, status: Status) -> None:
        self._ledger.announce(to_announcement(status))
        if status.paused != self.is_paused:
            self.is_paused = status.paused
            self.on_change()
        self._others = max(0, status.running + status.waiting - len(self._unanswered))
        self.on_load()
        if not status.more:
            self._settled.set()

    def _take_adapters(self, announced: Adapters) -> None:
        is_first, before = self._announced_changes is None, (self.adapters, self.adapter_changes)
        self.adapters, self.adapter_changes = announced.adapters, announced.changes
        self._announced_changes = self._announced_changes or LatestChanges()
        for change in announced.changes:
            self._announced_changes.note(change)
        if is_first or before != (self.adapters, self.adapter_changes):
            self.on_adapters()

    def _resume(self) -> Resume | None:
        """Return what the link says of the last session when it opens another."""
        return None if (known := self._ledger.resume) is None else Resume(*known)

    def _on_delta(self, delta: Delta | Pooled) -> None:
        if (stream := self._streams.get(delta.request_id)) is not None:
            stream.on_delta(delta)
            if delta.finish_reason is not None and stream.is_answered:
                self._note_answered(stream)

    def _on_answer(self, event: Accepted | Failed | Need) -> None:
        if (stream := self._streams.get(event.request_id)) is None:
            return
        if stream.items and not isinstance(event, Need):
            self._settle(event.request_id)
        match event:
            case Accepted():
                stream.on_accepted()
            case Need():
                if not stream.items:
                    raise ProtocolError(f"features are needed for {event.request_id}, which has no items")
                self._repair(stream, event.digests)
            case Failed():
                stream.on_failed(event)
                self._note_answered(stream)

    def _note_answered(self, stream: RemoteStream) -> None:
        self._unanswered.discard(stream.request_id)
        self.on_load()

    def _lose(self, event: Closed | Reset) -> None:
        if event.message != self._last_loss:
            if not self.sessions and isinstance(event, Reset) and event.code == "silence":  # engines load for minutes
                logger.info("waiting for the worker at %s: %s", self.name, event.message)
            else:
                level = logging.INFO if self._link.newest_only else logging.WARNING  # it is connected over another link
                logger.log(level, "the worker at %s is not connected: %s", self.name, event.message)
        self._last_loss = event.message
        self._refusal = _REFUSALS.get(event.code) if isinstance(event, Reset) else None
        is_death = isinstance(event, Reset) and event.code in _DEATHS
        if self._session is not None and isinstance(event, Reset) and is_death:
            self._meter.count(metrics.ENGINES_LOST, event.code)
            self._was_hung = event.code == EngineHung.code
        self._session = None
        self._settled.clear()
        # Where it is, and what its link says, is nothing for clients (threats S7).
        self._become(None, _HUNG if self._was_hung else _GONE)
        self._ledger.close()
        if self._forgetting is None:
            self._forgetting = asyncio.get_running_loop().call_later(_REMEMBER_S, self._ledger.forget)
        self._transfers.clear()
        self._lending.stop()
        self._others = 0
        self._unanswered.clear()
        self.on_load()
        for stream in list(self._streams.values()):
            stream.break_off(lost(is_death=is_death))

    def _repair(self, stream: RemoteStream, digests: tuple[Digest, ...]) -> None:
        """Send what the worker turned out to lack."""
        needed = self._ledger.need(stream.request_id, digests)
        self._meter.count(metrics.FEATURES_REPAIRED, amount=len(digests))
        self._begin(self._send_again(stream, needed), stream.context.copy())

    def _begin(self, work: Coroutine[None, None, None], context: Context | None = None) -> None:
        task = asyncio.create_task(work, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_again(self, stream: RemoteStream, digests: tuple[Digest, ...]) -> None:
        try:
            features = {digest: await stream.feature(digest) for digest in digests}
            if self._session is not None and self._is_under_way(stream):
                sent = self._ledger.send(stream.request_id, digests)
                self._send_features(self._session, stream, {digest: features[digest] for digest in sent})
        except SemelError as error:
            self._give_up(stream, error)
        except Exception:  # the edge of a task: its request has to hear of it
            logger.exception("an item of a request cannot be sent again")
            self._give_up(stream, ServiceError("an item could not be sent to the worker again; the log says why"))

    def _give_up(self, stream: RemoteStream, error: SemelError) -> None:
        """End a request whose item cannot be made again, unless its session ended meanwhile: it goes on elsewhere."""
        if self._is_under_way(stream):
            self.abort(stream)
            stream.fail(error)

    def _is_under_way(self, stream: RemoteStream) -> bool:
        return self._streams.get(stream.request_id) is stream and not stream.is_answered

    def _settle(self, request_id: str) -> None:
        """Withdraw what is still being sent for nobody: a request was taken, has failed or is given up."""
        for digest in self._ledger.settle(request_id):
            for transfer in self._transfers.pop(digest, ()):
                if self._session is not None:
                    self._session.withdraw(transfer)

    def _become(self, contract: Contract | None, reason: str) -> None:
        if contract is self._contract and reason == self.reason:
            return  # a worker that is gone is tried again and again
        self._contract, self.reason = contract, reason
        self.on_change()
