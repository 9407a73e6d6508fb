"""The fleet of a frontend: the workers that serve, the choice of one for a request, and the retry at another.

A worker serves from the moment its contract is found to be the fleet's, and not before. The fleet's contract is that of
the workers that serve; once nobody does, the next one may bring another. The model stays. Who is in the fleet at all is
decided elsewhere (`membership`).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Final
from weakref import WeakKeyDictionary

from semel.core import Adapter, Contract, Digest, FeatureInfo, Submission
from semel.errors import NotReady, SemelError, WorkerLost
from semel.fleet.adapters import FleetAdapters
from semel.fleet.balance import Balance
from semel.fleet.compatibility import Difference, RefusalReason, cell_difference, first_difference
from semel.fleet.pending import PendingRequests
from semel.fleet.quarantine import IDLE_WORKER_TIMEOUT_S, Content, EngineRun
from semel.fleet.ranking import numbers_in
from semel.fleet.retry_policy import FleetHealth, RetryPolicy
from semel.fleet.stream import BufferedAnswer, RemoteStream, StreamedAnswer, TokenCounts
from semel.fleet.worker import RemoteWorker
from semel.ledger import Directory
from semel.render import MakeFeature
from semel.telemetry import metrics
from semel.telemetry.meter import Sample

__all__ = ["Fleet", "fleet_samples"]

ContractCheck = Callable[[Contract], Difference | None]
"""Returns why a contract cannot be kept; None if it can."""

_STATES: Final = ("serving", "ejected", "refused", "not_connected")
_IDLE_WORKER_POLL_S: Final = 0.01
_PAUSE_POLL_S: Final = 0.2
_ADAPTERS_S: Final = 0.002
_FOR_CLIENTS: Final = re.compile(r"[;:] (send the request|try) again.*")
_REFUSED: Final = "the workers do not fit this frontend; its log says why"

logger = logging.getLogger(__name__)


class Fleet:
    """Any number of workers that serve one model."""

    def __init__(
        self, workers: Iterable[RemoteWorker] = (), *, health: FleetHealth | None = None, cell: str | None = None
    ) -> None:
        """Make a fleet; one that belongs to a cell leaves out workers of others."""
        self.tokens: defaultdict[str, TokenCounts] = defaultdict(TokenCounts)  # by model
        self._cell = cell
        self._health = health or FleetHealth()
        self._workers: list[RemoteWorker] = []
        self._leaving: set[RemoteWorker] = set()
        self._admitted: dict[RemoteWorker, Contract] = {}
        self._refused: dict[RemoteWorker, Difference] = {}
        self._preparing: dict[RemoteWorker, PendingRequests] = {}
        self._directory = Directory()
        self._balance = Balance()
        self._numbers: dict[RemoteWorker, int] = {}
        self._by_number: dict[int, RemoteWorker] = {}
        self._by_name: dict[str, RemoteWorker] = {}
        self._serving = 0  # the set of those that serve
        self._serving_names: frozenset[str] = frozenset()
        self._paused = 0  # of those that serve, the set of those whose engine is paused
        self._adapters = FleetAdapters()
        self._adapters_due: asyncio.TimerHandle | None = None
        self._stale: set[RemoteWorker] = set()  # those whose load may be another than the balance knows
        self._incarnations: dict[str, bytes] = {}  # of the processes that were last met, by the names of workers
        self._check: ContractCheck | None = None
        self._model: str | None = None
        # The terms under which those that serve were admitted.
        self._terms: tuple[ContractCheck | None, str | None] = None, None
        # Of workers that are reached over a newer link: what was prepared for the older one goes there.
        self._successors: WeakKeyDictionary[RemoteWorker, RemoteWorker] = WeakKeyDictionary()
        self._changed = asyncio.Event()
        for worker in workers:
            self.add(worker)

    @property
    def workers(self) -> tuple[RemoteWorker, ...]:
        """All of them, also those that do not serve."""
        return tuple(self._workers)

    @property
    def serving(self) -> list[RemoteWorker]:
        """The workers that take requests: connected, admitted and staying."""
        return list(self._admitted)

    @property
    def has_choice(self) -> bool:
        """Return whether a request may go to more than one worker."""
        return len(self._admitted) > 1

    @property
    def contract(self) -> Contract | None:
        """The contract of all workers that serve; None while nobody serves."""
        return next(iter(self._admitted.values()), None)

    @property
    def reason(self) -> str:
        """The reason why nobody serves, for clients and probes: one sentence, without addresses (threats S7)."""
        reasons = (_REFUSED if worker in self._refused else worker.reason for worker in self._workers)
        return next(filter(None, reasons), "there is no worker")

    @property
    def refusals(self) -> Mapping[RemoteWorker, RefusalReason]:
        """The workers that are there and not used, because they differ from the fleet or from us."""
        own = {worker: code for worker in self._workers if (code := worker.refusal) is not None}
        return {**own, **{worker: difference.reason for worker, difference in self._refused.items()}}

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """Those that the workers which serve have, or are to have, by name."""
        return self._adapters.by_name

    def add(self, worker: RemoteWorker) -> None:
        """Let a worker serve whenever it is connected and answers as the others do."""
        self._enter(worker)
        self._workers.append(worker)
        self._review()

    def retire(self, worker: RemoteWorker) -> None:
        """Give it no more requests; it answers those that it has."""
        self._leaving.add(worker)
        self._review()

    def restore(self, worker: RemoteWorker) -> None:
        """Let a retired worker serve again."""
        self._leaving.discard(worker)
        self._review()

    def replace(self, worker: RemoteWorker, successor: RemoteWorker) -> None:
        """Reach a worker over a newer link from now on. The older one answers what it has, and is not listed."""
        successor.take_over(worker)
        self._enter(successor)
        self._workers[self._workers.index(worker)] = successor
        self._successors[worker] = successor
        self._review()
        self._exit(worker)

    def remove(self, worker: RemoteWorker) -> None:
        """Forget a worker."""
        self._workers.remove(worker)
        self._health.forget(worker.name)
        self._incarnations.pop(worker.name, None)
        self.restore(worker)
        self._exit(worker)

    def _enter(self, worker: RemoteWorker) -> None:
        self._numbers[worker] = number = worker.enter(self._directory)
        self._by_number[number] = self._by_name[worker.name] = worker
        self._balance.put(number, worker.name)
        self._stale.add(worker)
        self._preparing[worker] = PendingRequests(self._directory.pending, 1 << number)
        worker.on_change = self._review
        worker.on_load = partial(self._stale.add, worker)
        worker.on_adapters = self._review_adapters_soon

    def _exit(self, worker: RemoteWorker) -> None:
        self._preparing.pop(worker).leave()
        worker.on_change = worker.on_load = worker.on_adapters = lambda: None
        worker.enter(Directory())  # it may announce more until its link is closed
        self._stale.discard(worker)
        number = self._numbers.pop(worker)
        self._balance.remove(number)
        del self._by_number[number]
        if self._by_name[worker.name] is worker:  # and not its successor
            del self._by_name[worker.name]

    async def changed(self) -> None:
        """Wait until a worker comes or goes."""
        await self._changed.wait()
        self._changed.clear()

    def admit(self, check: ContractCheck) -> None:
        """Leave out the workers whose contract we cannot keep, from now on. The model is settled with it."""
        self._check = check
        self._review()

    @contextmanager
    def preparing(
        self, digests: Iterable[Digest], *, prefix: bytes = b"", adapter: str | None = None
    ) -> Iterator[RemoteWorker]:
        """Choose the worker for a request that is prepared inside; others are chosen as if it were sent already."""
        distinct = tuple(dict.fromkeys(digests))
        worker = self.choose(distinct, prefix=prefix, adapter=adapter)
        try:
            with self._preparing[worker].request(distinct):
                self._stale.add(worker)
                yield worker
        finally:
            if worker in self._numbers:
                self._stale.add(worker)

    def choose(
        self,
        digests: Iterable[Digest],
        *,
        prefix: bytes = b"",
        without: Sequence[RemoteWorker] = (),
        adapter: str | None = None,
    ) -> RemoteWorker:
        """Choose the worker for a request with these items, and with this key for the opening of its conversation.

        One that names an adapter goes to a worker that has it.
        """
        serving = self._able(adapter)
        if without:
            serving &= ~self._set_of(without)
        if not serving:
            reason = self.reason if adapter is None or not self._serving else "no worker has the adapter now"
            raise NotReady(f"{reason}; try again in a moment")
        # If only ejected or paused ones are left, one of them is still better than none.
        among = serving & ~self._left_out() or serving
        if among.bit_count() == 1:
            return self._by_number[among.bit_length() - 1]
        distinct = tuple(dict.fromkeys(digests))
        self._refresh_loads()
        return self._by_number[self._balance.choose(among, distinct, self._directory.holders(distinct), prefix)]

    def _able(self, adapter: str | None) -> int:
        """Return the set of those that serve and have an adapter, if one is named."""
        return self._serving if adapter is None else self._adapters.holders(adapter)

    def choose_holder(
        self, digests: Iterable[Digest], cached: Container[Digest], *, adapter: str | None = None
    ) -> RemoteWorker | None:
        """Choose the least busy worker that has all of these items, or most of them while the others are cached.

        Of several the first that serves. None if there is none.
        """
        able, holders = self._able(adapter), []
        for digest in digests:
            workers = self._directory.announced.get(digest)
            holders.append(workers)
            if able & ~workers and digest not in cached:
                able &= workers
        if not able:
            return None
        self._refresh_loads()
        best = self._balance.best_holders(able & ~self._left_out() or able, holders)
        return next(worker for worker in self._admitted if best >> self._numbers[worker] & 1)

    def holding(self, digest: Digest) -> FeatureInfo | None:
        """Return what any serving worker has announced of an item."""
        number = next(numbers_in(self._directory.announced.get(digest) & self._serving), None)
        return None if number is None else self._by_number[number].holding(digest)

    async def submit(
        self,
        worker: RemoteWorker,
        submission: Submission,
        make: MakeFeature,
        kind: type[StreamedAnswer] = StreamedAnswer,
    ) -> StreamedAnswer:
        """Submit to a worker; if that is lost or fails before its first output, to another one.

        Of a `BufferedAnswer` at any time. As long as it may be submitted again its media are held.
        """
        content = Content.of(submission)
        if self._health.quarantine.has_isolated_retry(content):
            await self._wait_for_isolated_retry(content)
        if kind is BufferedAnswer:
            submission = BufferedAnswer.in_strides(submission)
        while (successor := self._successors.get(worker)) is not None:
            worker = successor
        policy = RetryPolicy(self._health, self._has_other, content, is_whole=kind is BufferedAnswer)
        again = None
        if self._has_other(worker.name):
            # The worker that has accepted it has counted what the client sent: a second one must not.
            uncounted = replace(submission, features={}, client_features=frozenset())
            again = partial(self.submit_again, worker, uncounted, make, policy)
        try:
            try:
                self._check_serving(worker, policy, submission.adapter)
                policy.begin(EngineRun(worker.name, worker.sessions))
                stream = await worker.submit(submission, make, watcher=policy)
            except SemelError as error:
                if not policy.is_resumable(error):
                    raise
                again = None  # this is the second time
                stream = await self.submit_again(worker, submission, make, policy, error)
        except BaseException:
            policy.settle()
            raise
        tokens = self.tokens[stream.contract.model]
        tokens.prompt += len(submission.prompt.token_ids)
        return kind(stream, policy, again, tokens)

    async def submit_again(
        self, lost: RemoteWorker, submission: Submission, make: MakeFeature, policy: RetryPolicy, error: SemelError
    ) -> RemoteStream:
        """Submit to another worker than the one that was lost or failed, if there is one."""
        await self._wait_for_idle_worker(lost, policy, error)
        busy = [one for one in self._admitted if policy.needs_idle_worker and not policy.may_retry_at(one.name)]
        if isinstance(error, WorkerLost) and lost in self._successors:
            busy.append(self._successors[lost])  # it is the same worker
        try:
            digests = (item.digest for item in submission.prompt.items)
            other = self.choose(digests, without=[lost, *busy], adapter=submission.adapter)
        except NotReady:
            raise error from None
        logger.warning("the request goes to another worker: %s", _FOR_CLIENTS.sub("", str(error)))
        self._health.count_retry(error)
        policy.begin(EngineRun(other.name, other.sessions))
        return await other.submit(submission, make, watcher=policy)

    async def _wait_for_isolated_retry(self, content: Content) -> None:
        """Wait while the same content is tried after an engine died, but not for ever: most often it is innocent."""
        await self._wait_while(partial(self._health.quarantine.has_isolated_retry, content))  # or it is refused

    async def _wait_for_idle_worker(self, lost: RemoteWorker, policy: RetryPolicy, error: SemelError) -> None:
        """Wait until a request that may have killed an engine can have another one to itself, but not for ever."""
        if not policy.needs_idle_worker:
            return

        def are_others_busy() -> bool:
            others = [worker.name for worker in self._admitted if worker is not lost]
            return bool(others) and not any(map(policy.may_retry_at, others))

        if not await self._wait_while(are_others_busy):
            raise error

    async def _wait_while(self, is_so: Callable[[], bool]) -> bool:
        """Wait while something is so, but not for ever: False then. The time stands still while an engine is paused."""
        loop, left_s = asyncio.get_running_loop(), IDLE_WORKER_TIMEOUT_S
        while is_so():
            if left_s <= 0:
                return False
            before = loop.time()
            await asyncio.sleep(_PAUSE_POLL_S if self._paused else _IDLE_WORKER_POLL_S)  # only after an engine has died
            if not self._paused:
                left_s -= loop.time() - before
        return True

    def load(self, worker: RemoteWorker) -> int:
        """Count the requests that a worker is answering or about to, and those that it has just failed."""
        return worker.load + self._preparing[worker].requests + self._health.load(worker.name)

    def is_ejected(self, worker: RemoteWorker) -> bool:
        """Return whether a worker gets no requests but trials, because it fails."""
        return self._health.is_ejected(worker.name)

    def _left_out(self) -> int:
        """Return the set of those that serve and get no requests, because they fail or are paused."""
        if not self._health.has_ejected:
            return self._paused
        names = self._health.left_out(self._serving_names, self._is_preparing)
        return self._paused | self._set_of(self._by_name[name] for name in names)

    def _is_preparing(self, name: str) -> bool:
        return self._preparing[self._by_name[name]].requests > 0

    def _set_of(self, workers: Iterable[RemoteWorker]) -> int:
        return sum(1 << self._numbers[worker] for worker in set(workers) if worker in self._numbers)

    def _refresh_loads(self) -> None:
        """Let the balance know the loads that have changed. Failures count as load for a while, without a word."""
        self._stale.update(self._by_name[name] for name in self._health.charged if name in self._by_name)
        for worker in self._stale:
            self._balance.set_load(self._numbers[worker], self.load(worker))
        self._stale.clear()
        self._stale.update(self._by_name[name] for name in self._health.charged if name in self._by_name)

    def _check_serving(self, worker: RemoteWorker, policy: RetryPolicy, adapter: str | None) -> None:
        """Raise if it was refused, retired or removed since it was chosen: preprocessing takes its time.

        Or if it has not the weights of the adapter any more.
        """
        if worker in self._admitted and adapter is not None and not self._able(adapter) >> self._numbers[worker] & 1:
            policy.pass_over()
            raise NotReady("the adapter was changed meanwhile; try again in a moment")
        if worker not in self._admitted:
            policy.pass_over()
            reason = _REFUSED if worker in self._refused else worker.reason or "the worker leaves the fleet"
            raise NotReady(f"{reason}; try again in a moment")

    def _has_other(self, worker: str) -> bool:
        return len(self._serving_names) > (worker in self._serving_names)

    def _review(self) -> None:
        """Decide who serves, as soon as anybody comes or goes: those that did go before those that did not."""
        staying = [worker for worker in self._workers if worker.is_connected and worker not in self._leaving]
        staying.sort(key=lambda worker: self._admitted.get(worker) is not worker.contract)
        admitted, before, self._admitted, self._refused = self._admitted, self._refused, {}, {}
        terms, self._terms = self._terms, (self._check, self._model)
        for worker in staying:
            # A new process has failed nobody.
            if self._incarnations.setdefault(worker.name, worker.incarnation) != worker.incarnation:
                self._incarnations[worker.name] = worker.incarnation
                self._health.forget(worker.name)
            # Who was admitted under the same terms is as good as the others: a thousand would be held against one.
            was_admitted = terms == self._terms and admitted.get(worker) is worker.contract
            if was_admitted or (reason := self._reason_against(worker.contract)) is None:
                self._admitted[worker] = worker.contract
            else:
                self._refused[worker] = reason
                if before.get(worker) != reason:
                    logger.error("the worker at %s is not used: %s", worker.name, reason)
        if self._check is not None and self._model is None and self._admitted:
            self._model = next(iter(self._admitted.values())).model
        self._serving = self._set_of(self._admitted)
        self._serving_names = frozenset(worker.name for worker in self._admitted)
        self._paused = self._set_of(worker for worker in self._admitted if worker.is_paused)
        self._review_adapters()
        self._changed.set()

    def _review_adapters_soon(self) -> None:
        """Review them once for all workers that tell of theirs at the same time."""
        if self._adapters_due is None:
            self._adapters_due = asyncio.get_running_loop().call_later(_ADAPTERS_S, self._review_adapters)

    def _review_adapters(self) -> None:
        if self._adapters_due is not None:
            self._adapters_due.cancel()
            self._adapters_due = None
        self._adapters.review({worker: self._numbers[worker] for worker in self._admitted})

    def _reason_against(self, contract: Contract) -> Difference | None:
        if (other := cell_difference(self._cell, contract)) is not None:
            return other
        if self._model is not None and contract.model != self._model:
            text = f"it serves {contract.model!r}, the fleet {self._model!r}: give both the same --served-model-name"
            return Difference("model", text)
        ours = self.contract or contract
        return first_difference(ours, contract) or (None if self._check is None else self._check(contract))


def fleet_samples(fleet: Fleet, *, per_worker: bool = True) -> Iterator[Sample]:
    """Yield the fleet's, and those of each worker: of a thousand workers and frontends the latter are millions."""
    for model, tokens in fleet.tokens.items():
        yield metrics.PROMPT_TOKENS, tokens.prompt, (model,)
        yield metrics.GENERATION_TOKENS, tokens.generation, (model,)
    refusals = fleet.refusals
    found = Counter("refused" if worker in refusals else _state(fleet, worker) for worker in fleet.workers)
    for state in _STATES:
        yield metrics.WORKERS, found[state], (state,)
    if not per_worker:
        return
    for worker in fleet.workers:
        yield metrics.WORKER_CONNECTED, worker.is_connected, (worker.name,)
        if worker.is_connected:
            yield metrics.LINK_KEY_GENERATION, worker.generation, (worker.name,)
        yield metrics.WORKER_EJECTED, fleet.is_ejected(worker), (worker.name,)
        yield metrics.WORKER_RUNNING, worker.load, (worker.name,)
    for worker, reason in refusals.items():
        yield metrics.WORKER_REFUSED, 1, (worker.name, reason)


def _state(fleet: Fleet, worker: RemoteWorker) -> str:
    if not worker.is_connected:
        return "not_connected"
    return "ejected" if fleet.is_ejected(worker) else "serving"
