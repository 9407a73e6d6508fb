"""The level of decisions: what frontends and workers decide, without their messages. Up to a thousand of each.

Choosing, balancing, pending requests, retries, ejection and the directory are the shipped classes (`view`). Engines,
networks and processors are models (`engine`, `costs`). A frontend's event loop does one thing after another, its pool
so many at a time; a worker's network carries one feature after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heapreplace
from math import inf
from random import Random
from typing import Final

from semel.core import Digest
from semel.errors import ConfigError, SemelError, ServiceError, WorkerLost
from semel.fleet.balance import Balance
from semel.fleet.ejection import EjectionLimits
from semel.fleet.quarantine import Content, EngineRun
from semel.fleet.ranking import Ranking, numbers_in
from semel.fleet.retry_policy import FleetHealth, RetryPolicy
from semel.lab.bench.timing import without_garbage_collection
from semel.lab.simulate.batches import Batches, Kernel
from semel.lab.simulate.costs import MODELLED, Costs
from semel.lab.simulate.engine import Job, Prompts
from semel.lab.simulate.faults import Broken, Crash, Fault, Join, Slow
from semel.lab.simulate.figures import Figures
from semel.lab.simulate.members import AT_ONCE_S, ModelledRequest, ModelledWorker, Remakes, SilentHealth, Sizes
from semel.lab.simulate.view import FleetView, FrontendView, name_of
from semel.lab.simulate.workload import Ask, Item, Workload, digest_of

__all__ = ["Decisions", "Sizes"]

_SAMPLE_S: Final = 1.0

# Bytes of messages, measured (docs/internals/protocol.md has their fields).
_SUBMIT: Final = (284, 63, 3)  # by itself, for each item, for each token of text
_STATUS: Final = (23, 47, 34)  # by itself, for each item that came, for each that is gone
_ACCEPTED, _DELTA, _FAILED, _NEED = 30, 40, 90, 60


class Decisions:
    """A fleet under a workload."""

    def __init__(
        self,
        sizes: Sizes,
        workload: Workload,
        *,
        seed: int,
        costs: Costs = MODELLED,
        faults: Sequence[Fault] = (),
        balance: Callable[[Ranking], Balance] = Balance,
        is_round_robin: bool = False,
        figures: Figures | None = None,
    ) -> None:
        self.sizes = sizes
        self.costs = costs
        self.figures = figures or Figures()
        self.kernel = Kernel()
        self.open = 0
        """Requests that are not answered."""

        self._is_round_robin = is_round_robin
        self._asks: Iterator[Ask] | None = workload.asks(Random(f"{seed}/asks"))
        self._rng = Random(f"{seed}/fleet")
        self._announce_interval_s = sizes.interval_s
        joiners = [fault for fault in faults if isinstance(fault, Join)]
        workers = sizes.workers + len(joiners)
        self._view = FleetView(workers, balance)
        self._frontends = [
            FrontendView(sizes.feature_cache_bytes, sizes.processes, self._health() if faults else None)
            for _ in range(sizes.frontends)
        ]
        phases = (self._rng.random() * self._announce_interval_s for _ in range(workers))
        self._workers = [ModelledWorker(n, phase, sizes.engine.item_bytes) for n, phase in enumerate(phases)]
        self._jobs: dict[Job, ModelledRequest] = {}
        self._remakes = Remakes(self.figures.extra)
        self._begun = 0
        self._is_started = False
        self._progress: Callable[[float], None] = lambda _: None
        self._prompts = Prompts()
        for worker in self._workers[: sizes.workers]:
            self._join(worker)
        for worker, joiner in zip(self._workers[sizes.workers :], joiners, strict=True):
            self.kernel.at(joiner.at_s, self._join, worker)
        for fault in faults:
            if not isinstance(fault, Join):
                self.kernel.at(fault.at_s, self._begin_fault, fault)

    def run(self, progress: Callable[[float], None] | None = None) -> Figures:
        """Until all requests are answered. `progress` is called with the simulated time, once for each second."""
        self._progress = progress or self._progress
        with without_garbage_collection():  # an eighth of the time, measured
            self.run_until(inf)
        for worker in self._workers:
            self._count(worker)
        return self.figures

    def run_until(self, seconds: float) -> None:
        """Until a simulated time; what engines count is not in the figures yet."""
        if not self._is_started:
            self._is_started = True
            self._next_ask()
            self._sample()
        self.kernel.run(seconds)

    def holds(self, key: int, tenant: str = "tenant-0") -> int:
        """Return how many workers hold an item."""
        digest = digest_of(tenant, key)
        return sum(digest in worker.items for worker in self._workers)

    # Requests, from the client to the worker.

    def _next_ask(self) -> None:
        if self._asks is None:
            return
        if (ask := next(self._asks, None)) is None:
            self._asks = None
        else:
            self.kernel.at(ask.at_s, self._arrive, ask)

    def _arrive(self, ask: Ask) -> None:
        self.figures.ask(ask)
        self.open += 1
        frontend = self._frontends[self._rng.randrange(len(self._frontends))]
        self._occupy(frontend, self.costs.parse_s + len(ask.items) * self.costs.digest_s)
        self.kernel.at(frontend.free_s, self._prepare, ModelledRequest(ask, frontend, self._prompts.places(ask)), 0)
        self._next_ask()

    def _occupy(self, frontend: FrontendView, seconds: float) -> None:
        frontend.free_s = max(frontend.free_s, self.kernel.now) + seconds

    def _prepare(self, request: ModelledRequest, without: int) -> None:
        """A worker is chosen, and what it lacks is preprocessed."""
        frontend = request.frontend
        prefix = b"" if without else request.prefix
        number = self._choose(request, prefix, without)
        if number is None:
            self._refuse()
            return
        worker = request.worker = self._workers[number]
        request.link = self._view.link(frontend, number)
        request.link.pending.begin(request.digests)
        ready_s = self.kernel.now
        for digest, item in request.digests.items():
            if not self._view.knows(frontend, number, digest):
                ready_s = max(ready_s, self._make(frontend, digest, item))
        if frontend.health is not None:
            if request.policy is None:
                content = Content(request.ask.tenant, self.figures.requests)
                request.policy = RetryPolicy(frontend.health, self._has_other, content, is_whole=False)
            request.policy.begin(EngineRun(name_of(number), worker.sessions))
        self.kernel.at(ready_s, self._send, request)

    def _choose(self, request: ModelledRequest, prefix: bytes, without: int) -> int | None:
        frontend = request.frontend
        if not self._is_round_robin:
            return self._view.choose(frontend, tuple(request.digests), prefix, without=without)
        serving = list(numbers_in(self._view.serving & ~without))
        frontend.turn += 1
        return serving[(frontend.turn - 1) % len(serving)] if serving else None

    def _make(self, frontend: FrontendView, digest: Digest, item: Item) -> float:
        """Return when a frontend has a feature: from its cache, from one that is being made, or from its pool."""
        now = self.kernel.now
        if frontend.features.get(digest) is not None:
            return max(now, frontend.making.get(digest, now))
        self.figures.preprocessed += 1
        seconds = self.costs.process_s(item)
        ready_s = max(frontend.pool[0], now) + seconds
        self._remakes.add(digest, now, ready_s, seconds)
        heapreplace(frontend.pool, ready_s)
        for evicted in frontend.features.put(digest, item):
            frontend.making.pop(evicted, None)
        frontend.making[digest] = ready_s
        return ready_s

    def _send(self, request: ModelledRequest) -> None:
        frontend, worker, figures = request.frontend, request.worker, self.figures
        self._occupy(frontend, self.costs.render_s + self.costs.send_s)
        lacking = tuple(d for d in request.digests if not self._view.knows(frontend, worker.number, d))
        request.link.pending.end(request.digests)
        if not self._view.serving >> worker.number & 1:
            self._fail(request, WorkerLost("the worker is lost"))
            return
        request.brought = lacking
        request.link.sent.begin(lacking)
        request.is_arriving = True
        request.link.unanswered += 1
        worker.requests[request] = None
        text = request.ask.prompt_tokens - sum(item.tokens for item in request.ask.items)
        figures.to_workers["Submit"].count(1, _SUBMIT[0] + _SUBMIT[1] * len(request.ask.items) + _SUBMIT[2] * text)
        figures.by_worker[worker.name] += 1
        self._tell_soon(worker)
        known_s = max((worker.arriving.get(d, 0.0) for d in request.digests), default=0.0)
        self._carry(request, lacking, max(frontend.free_s, known_s), self._reach)

    def _carry(
        self,
        request: ModelledRequest,
        digests: Sequence[Digest],
        from_s: float,
        then: Callable[[ModelledRequest], None],
    ) -> None:
        """Bring features to a worker, one after another."""
        worker, figures = request.worker, self.figures
        nbytes = sum(request.digests[digest].nbytes for digest in digests)
        figures.features_sent += len(digests)
        figures.feature_bytes += nbytes
        if nbytes:
            figures.to_workers["Feature"].count(len(digests), nbytes)
            worker.link_free_s = max(worker.link_free_s, from_s) + nbytes / self.costs.bandwidth
            from_s = worker.link_free_s
            worker.arriving.update(dict.fromkeys(digests, from_s))
        self.kernel.at(from_s + self.costs.latency_s, then, request)

    # Requests at the worker.

    def _reach(self, request: ModelledRequest) -> None:
        worker = request.worker
        if request not in worker.requests:
            return  # it was lost meanwhile
        if worker.is_broken:
            self.figures.to_frontends["Failed"].count(1, _FAILED)
            self._leave(request)
            self._fail(request, ServiceError("the engine failed"))
            return
        needed = [d for d in request.digests if d not in worker.items and d not in request.brought]
        if needed:
            self.figures.to_frontends["Need"].count(1, _NEED)
            self.figures.extra["repairs"] = self.figures.extra.get("repairs", 0) + len(needed)
            made_s = max(self._make(request.frontend, digest, request.digests[digest]) for digest in needed)
            self._carry(request, needed, made_s + self.costs.latency_s, self._begin)
        else:
            self._begin(request)

    def _begin(self, request: ModelledRequest) -> None:
        """The engine has all that it needs: it takes the request, and the frontend learns what it holds now."""
        worker, updates = request.worker, self._view.updates
        if request not in worker.requests:
            return
        for digest, item in request.digests.items():
            worker.arriving.pop(digest, None)
            if worker.items.get(digest) is None:
                evicted = worker.items.put(digest, item)
                if digest in worker.items:
                    updates.hold(worker.number, digest)
                for gone in evicted:
                    updates.drop(worker.number, gone)
        request.arrive()
        self.figures.to_frontends["Accepted"].count(1, _ACCEPTED)
        self._tell_at_once(request)
        ask = request.ask
        self._begun += 1
        job = Job.of(ask, str(self._begun), request.keys, request.places)
        self._jobs[job] = request
        worker.batches.add(job)

    def _on_token(self, job: Job) -> None:
        request = self._jobs[job]
        ask, delay_s = request.ask, self.kernel.now + self.costs.latency_s - request.ask.at_s
        if not request.begun:
            request.begun = True
            self.figures.first_token_s.append(delay_s)
            if request.policy is not None:
                request.policy.on_output()
        if job.generated >= job.answer_tokens:
            del self._jobs[job]
            self.open -= 1
            self.figures.answered += 1
            self.figures.whole_s.append(delay_s)
            self.figures.to_frontends["Delta"].count(ask.answer_tokens, _DELTA * ask.answer_tokens)
            self._leave(request)
            if request.policy is not None:
                request.policy.on_finish()
                request.policy.settle()

    def _leave(self, request: ModelledRequest) -> None:
        """A worker has done with a request."""
        worker = request.worker
        del worker.requests[request]
        request.link.unanswered -= 1
        request.arrive()
        self._tell_at_once(request)

    def _fail(self, request: ModelledRequest, error: SemelError) -> None:
        """Another worker gets it, or it is refused."""
        policy, lost = request.policy, request.worker.number
        if policy is not None:
            policy.on_failure(error, request.begun)
            if not request.begun and policy.is_resumable(error) and self._has_other(name_of(lost)):
                self.figures.failed_over += 1
                self.kernel.after(self.costs.latency_s, self._prepare, request, 1 << lost)
                return
            policy.settle()
        self._refuse()

    def _refuse(self) -> None:
        self.open -= 1
        self.figures.refused += 1

    def _has_other(self, name: str) -> bool:
        serving = self._view.serving
        return serving.bit_count() > 1 or name_of(serving.bit_length() - 1) != name

    # Cache updates.

    def _tell_at_once(self, request: ModelledRequest) -> None:
        worker = request.worker
        self._view.tell_one(request.frontend, worker.number, len(worker.requests))
        if self._announce_interval_s <= AT_ONCE_S:
            self._announce(worker)
        self._tell_soon(worker)

    def _tell_soon(self, worker: ModelledWorker) -> None:
        if not worker.telling:
            worker.telling = True
            ticks = int((self.kernel.now - worker.phase_s) / self._announce_interval_s) + 1
            self.kernel.at(worker.phase_s + ticks * self._announce_interval_s, self._tell, worker)

    def _tell(self, worker: ModelledWorker) -> None:
        worker.telling = False
        self._announce(worker, load=True)

    def _announce(self, worker: ModelledWorker, *, load: bool = False) -> None:
        running = len(worker.requests) if load else self._view.known_load[worker.number]
        have, gone = self._view.tell(worker.number, running)
        if load or have or gone:
            peers, each = len(self._frontends), _STATUS[0] + _STATUS[1] * have + _STATUS[2] * gone
            self.figures.to_frontends["Status"].count(peers, peers * each)

    def _sample(self) -> None:
        self.figures.loads.extend(
            len(worker.requests) for worker in self._workers if self._view.serving >> worker.number & 1
        )
        self._progress(self.kernel.now)
        if self._asks is not None or self.open:
            self.kernel.after(_SAMPLE_S, self._sample)

    # Workers that come, go and fail.

    def _health(self) -> FleetHealth:
        return SilentHealth(EjectionLimits(self.sizes.eject_after), now=lambda: self.kernel.now)

    def _join(self, worker: ModelledWorker) -> None:
        worker.batches = Batches(self.kernel, self.costs, self.sizes.engine, self._on_token)
        worker.sessions += 1
        self._view.join(worker.number)

    def _count(self, worker: ModelledWorker) -> None:
        """Take in what an engine counted."""
        if worker.sessions:
            model = worker.batches.model
            self.figures.encodes += model.encodes
            self.figures.encoder_hits += model.encoder_hits
            self.figures.prefix_hits += model.prefix_hits

    def _begin_fault(self, fault: Fault) -> None:
        match fault:
            case Crash():
                self._crash(self._workers[fault.worker], fault.for_s)
            case Broken():
                worker = self._workers[fault.worker]
                worker.is_broken = True
                self.kernel.after(fault.for_s, setattr, worker, "is_broken", False)
            case Slow():
                model = self._workers[fault.worker].batches.model
                model.slowness = fault.factor
                self.kernel.after(fault.for_s, setattr, model, "slowness", 1.0)
            case _:
                raise ConfigError(f"decisions know no {type(fault).__name__}: use --level whole")

    def _crash(self, worker: ModelledWorker, for_s: float) -> None:
        self._count(worker)
        worker.batches.stop()
        self._view.leave(worker.number, list(worker.items))
        worker.items.clear()
        worker.arriving.clear()
        lost, worker.requests = list(worker.requests), {}
        self._jobs = {job: request for job, request in self._jobs.items() if request.worker is not worker}
        for request in lost:
            request.arrive()
            self._fail(request, WorkerLost("the worker is lost"))
        self.kernel.after(for_s, self._join, worker)
