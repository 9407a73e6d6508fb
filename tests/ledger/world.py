"""A small world: frontends and workers with real ledgers, holdings and intakes around simulated engines and sessions.

Every method that a driver may call is one step, and takes numbers, of which it uses what it can: a driver draws them
from hypothesis or from a seeded generator. `check` holds the invariants after any step, `drain` lets everything come to
its end and holds the outcome.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Literal

from semel.core import Digest, Feature, FeatureInfo
from semel.errors import FeatureMissing
from semel.ledger import Announcement, Holdings, Intake, Ledger
from semel.worker.cache_updates import CacheUpdates, StateDelta
from tests.ledger.examples import DIGESTS, FEATURES, HOLDINGS, content_of


@dataclass(frozen=True)
class Submit:
    request: str
    digests: tuple[Digest, ...]
    payloads: tuple[Digest, ...]


@dataclass(frozen=True)
class Abort:
    request: str


@dataclass(frozen=True)
class Need:
    request: str
    digests: tuple[Digest, ...]


@dataclass(frozen=True)
class Ended:
    request: str
    how: Literal["accepted", "failed", "done"]
    held: frozenset[Digest] = frozenset()
    """What the engine held of the request when it was taken."""


@dataclass(frozen=True)
class Forget:
    pass


ToWorker = Submit | Abort
ToFrontend = Announcement | Need | Ended | Forget


@dataclass
class Transfer:
    digest: Digest
    after: int
    """Control messages that were sent before it, none of which it overtakes."""
    is_sent: bool = False
    """Whether all its bytes have left: it cannot be withdrawn any more."""


@dataclass
class Session:
    """Everything under way between one frontend and one worker."""

    to_worker: deque[ToWorker] = field(default_factory=deque)
    to_frontend: deque[ToFrontend] = field(default_factory=deque)
    bulk: list[Transfer] = field(default_factory=list)
    said: int = 0
    read: int = 0

    def tell_worker(self, message: ToWorker) -> None:
        self.said += 1
        self.to_worker.append(message)

    def carry(self, digests: Iterable[Digest]) -> None:
        self.bulk.extend(Transfer(digest, self.said) for digest in digests)

    def withdraw(self, digests: Iterable[Digest]) -> None:
        unwanted = set(digests)
        self.bulk = [transfer for transfer in self.bulk if transfer.is_sent or transfer.digest not in unwanted]


class SlowLedger:
    """What a ledger should know, by the words of its contract."""

    def __init__(self, announced: Iterable[Digest] = ()) -> None:
        self.announced = set(announced)
        self.noted: set[Digest] = set()
        self.counting: dict[str, set[Digest]] = {}

    def knows(self, digest: Digest) -> bool:
        return digest in self.announced or digest in self.noted

    def settle(self, request: str) -> set[Digest]:
        self.counting.pop(request, None)
        ended = {digest for digest in self.noted if not any(digest in used for used in self.counting.values())}
        self.noted -= ended
        return ended


class Store:
    """An engine's item cache: least recently used goes first, what is larger than all of it is not kept."""

    def __init__(
        self, capacity: int, hold: Callable[[Digest, FeatureInfo], None], drop: Callable[[Digest], None]
    ) -> None:
        self.capacity = capacity
        self.items: OrderedDict[Digest, Feature] = OrderedDict()
        self._hold = hold
        self._drop = drop

    @property
    def nbytes(self) -> int:
        return sum(feature.nbytes for feature in self.items.values())

    def submit(self, digests: Sequence[Digest], given: Mapping[Digest, Feature]) -> set[Digest]:
        """Take a submission; the digests that it referred to. `FeatureMissing` leaves no trace."""
        distinct = dict.fromkeys(digests)
        referred = [digest for digest in distinct if digest not in given]
        missing = [digest for digest in referred if digest not in self.items]
        if not missing and sum(FEATURES[digest].nbytes for digest in distinct) > self.capacity:
            missing = referred  # its own items could push out what it refers to
        if missing:
            raise FeatureMissing(missing)
        for digest in distinct:
            if digest in self.items:
                self.items.move_to_end(digest)
        for digest in digests:
            feature = given[digest] if digest in given else self.items[digest]
            assert content_of(feature) == digest, "the engine got the feature of another item"
            self.put(digest, feature)
        return set(referred)

    def put(self, digest: Digest, feature: Feature) -> None:
        if feature.nbytes > self.capacity or digest in self.items:
            return
        while self.nbytes + feature.nbytes > self.capacity:
            self.evict(next(iter(self.items)))
        self.items[digest] = feature
        self._hold(digest, FeatureInfo.of(feature))

    def evict(self, digest: Digest) -> None:
        if self.items.pop(digest, None) is not None:
            self._drop(digest)


Owner = tuple[int, str]
"""A request at a worker: its frontend and its id."""


class Worker:
    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.updates = world.updates_kind()
        self.incarnation = world.next_incarnation()
        self.intake = world.intake_kind()
        self.store = Store(
            world.capacity,
            lambda digest, holding: self.updates.hold(digest, holding, world.now),
            lambda digest: self.updates.drop(digest, world.now),
        )
        self.open: dict[Owner, tuple[Digest, ...]] = {}
        self.running: dict[Owner, tuple[tuple[Digest, ...], set[Digest]]] = {}
        """What was taken: its digests, and those that went by reference."""

    @property
    def holdings(self) -> Holdings[int]:
        return self.updates.holdings

    def meet(self, frontend: Frontend) -> None:
        """A session begins."""
        ledger = frontend.ledgers[self.number]
        resume = ledger.resume
        ledger.open(self.incarnation)
        known = resume[1] if resume is not None and resume[0] == self.incarnation else None
        if known is None:
            frontend.slow[self.number].announced.clear()
        self.publish(self.updates.join(frontend.number, known))

    def publish(self, deltas: Iterable[StateDelta[int]]) -> None:
        for delta in deltas:
            for peer in delta.peers:
                self.world.sessions[peer, self.number].to_frontend.append(delta.announcement)

    def say(self, frontend: int, message: ToFrontend) -> None:
        """What is new goes ahead of a message about a request."""
        self.publish(self.updates.concerning(frontend))
        self.world.sessions[frontend, self.number].to_frontend.append(message)

    def announce(self) -> None:
        """A turn of a round."""
        self.publish(self.updates.next_turn(self.world.now))

    def send_slice(self, frontend: int) -> bool:
        """The next slice of a snapshot; whether there was one."""
        delta = self.updates.next_slice(frontend)
        self.publish([] if delta is None else [delta])
        return delta is not None

    def tell_the_rest(self) -> None:
        for frontend in range(len(self.world.frontends)):
            while self.send_slice(frontend):
                pass
        while self.updates.due < inf:
            self.announce()

    def read(self, frontend: int, message: ToWorker) -> None:
        owner = (frontend, message.request)
        if isinstance(message, Abort):
            self.close(owner)
            self.running.pop(owner, None)
            return
        opened = self.intake.open(*owner, message.digests, message.payloads, self.holdings.__contains__)
        self.open[owner] = message.digests
        assert opened.is_ready == self.intake.is_ready(*owner)
        self.ask(owner, opened.needed)

    def ask(self, owner: Owner, digests: tuple[Digest, ...]) -> None:
        if digests:
            self.say(owner[0], Need(owner[1], digests))

    def close(self, owner: Owner) -> None:
        assert self.intake.close(*owner) == (self.open.pop(owner, None) is not None)

    def lose(self, frontend: int) -> None:
        """The session has ended, and a new one begins."""
        self.intake.forget(frontend)
        self.updates.leave(frontend)
        self.open = {owner: digests for owner, digests in self.open.items() if owner[0] != frontend}
        self.running = {owner: taken for owner, taken in self.running.items() if owner[0] != frontend}

    def ready(self) -> list[Owner]:
        return [owner for owner in self.open if self.intake.is_ready(*owner)]

    def submit(self, owner: Owner) -> None:
        try:
            referred = self.store.submit(self.open[owner], self.intake.features(*owner))
        except FeatureMissing as missing:
            self.world.rounds[owner[1]] += 1
            assert self.world.rounds[owner[1]] <= len(set(self.open[owner])), "more rounds than digests"
            self.ask(owner, self.intake.missing(*owner, [Digest(digest) for digest in missing.digests]))
            return
        self.running[owner] = self.open[owner], referred
        self.world.took(owner[1])
        self.close(owner)
        held = frozenset(digest for digest in self.running[owner][0] if digest in self.store.items)
        self.say(owner[0], Ended(owner[1], "accepted", held))

    def refuse(self, owner: Owner) -> None:
        self.close(owner)
        self.world.outcomes[owner[1]] = "failed"
        self.say(owner[0], Ended(owner[1], "failed"))

    def miss(self, owner: Owner) -> None:
        """The engine core turns out to lack what a running request referred to."""
        digests, referred = self.running.pop(owner)
        self.world.taken[owner[1]] -= 1
        self.world.rounds[owner[1]] = 0
        for digest in referred:
            self.store.evict(digest)
        opened = self.intake.reopen(*owner, digests, sorted(referred))
        self.open[owner] = digests
        self.ask(owner, opened.needed)


class Frontend:
    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.cache: set[Digest] = set()
        self.ledgers = [world.ledger_kind() for _ in range(world.num_workers)]
        self.slow = [SlowLedger() for _ in self.ledgers]
        self.wanted: dict[str, int] = {}
        """The requests that somebody waits for, and their workers."""
        self.repairs: list[tuple[str, tuple[Digest, ...]]] = []
        """What is being processed again."""

    def submit(self, worker: int, request: str, digests: tuple[Digest, ...]) -> None:
        ledger, slow, session = self.ledgers[worker], self.slow[worker], self.world.sessions[self.number, worker]
        payloads = ledger.submit(request, digests)
        assert payloads == tuple(digest for digest in dict.fromkeys(digests) if not slow.knows(digest))
        slow.counting[request] = set(digests)
        slow.noted.update(payloads)
        self.wanted[request] = worker
        self.cache.update(digests)
        session.tell_worker(Submit(request, digests, payloads))
        session.carry(payloads)

    def read(self, worker: int, message: ToFrontend) -> None:
        ledger, slow = self.ledgers[worker], self.slow[worker]
        match message:
            case Announcement(since=since):
                ledger.announce(message)
                if since is None:
                    slow.announced.clear()
                slow.announced.difference_update(message.gone)
                slow.announced.update(message.holdings)
            case Forget():
                self.cache.clear()
            case Need(request, needed) if request in self.wanted:
                to_get = ledger.need(request, needed)
                slow.counting.setdefault(request, set()).update(needed)
                if all(digest in self.cache for digest in to_get):
                    self.send(request, to_get)
                else:
                    self.repairs.append((request, to_get))
            case Ended(request, how, held) if request in self.wanted:
                if how == "accepted" and ledger.resume is not None:  # all slices are here
                    counted = slow.counting.get(request, set())
                    assert counted & held == counted & slow.announced, "taken, and not announced to whom it concerns"
                self.settle(request)
                if how != "accepted":
                    del self.wanted[request]

    def send(self, request: str, digests: tuple[Digest, ...]) -> None:
        """Send what was needed, unless nobody waits for the request any more."""
        if (worker := self.wanted.get(request)) is None:
            return
        self.cache.update(digests)
        to_send = self.ledgers[worker].send(request, digests)
        self.slow[worker].noted.update(to_send)
        self.world.sessions[self.number, worker].carry(to_send)

    def abort(self, request: str) -> None:
        worker = self.wanted[request]
        self.settle(request)
        self.world.sessions[self.number, worker].tell_worker(Abort(request))
        del self.wanted[request]

    def settle(self, request: str) -> None:
        worker = self.wanted[request]
        ended = self.ledgers[worker].settle(request)
        assert set(ended) == self.slow[worker].settle(request)
        self.world.sessions[self.number, worker].withdraw(ended)

    def lose(self, worker: int) -> None:
        """The session has ended."""
        self.ledgers[worker].close()
        self.slow[worker] = SlowLedger(self.slow[worker].announced)
        self.wanted = {request: its for request, its in self.wanted.items() if its != worker}
        self.repairs = [repair for repair in self.repairs if repair[0] in self.wanted]


class World:
    def __init__(
        self,
        num_frontends: int,
        num_workers: int,
        capacity: int,
        *,
        ledger_kind: Callable[[], Ledger] = Ledger,
        intake_kind: Callable[[], Intake[int]] = Intake,
        updates_kind: Callable[[], CacheUpdates[int]] = CacheUpdates,
    ) -> None:
        self.num_workers = num_workers
        self.capacity = capacity * Digest.size
        self.ledger_kind, self.intake_kind, self.updates_kind = ledger_kind, intake_kind, updates_kind
        self.now = 0.0
        self.incarnations = 0
        self.sessions = {(f, w): Session() for f in range(num_frontends) for w in range(num_workers)}
        self.frontends: list[Frontend] = []
        self.frontends.extend(Frontend(self, number) for number in range(num_frontends))
        self.workers = [Worker(self, number) for number in range(num_workers)]
        self._meet()
        self.outcomes: dict[str, Literal["good", "failed", "given up"]] = {}
        self.taken: Counter[str] = Counter()
        self.rounds: Counter[str] = Counter()

    def next_incarnation(self) -> bytes:
        self.incarnations += 1
        return self.incarnations.to_bytes(8, "big")

    def _meet(self, frontend: int | None = None, worker: int | None = None) -> None:
        for f, w in self.sessions:
            if frontend in {None, f} and worker in {None, w}:
                self.workers[w].meet(self.frontends[f])

    def took(self, request: str) -> None:
        self.taken[request] += 1
        assert self.taken[request] == 1, "taken twice"

    # Steps.

    def submit(self, frontend: int, worker: int, items: Sequence[int]) -> None:
        request = f"r{len(self.outcomes)}"
        self.outcomes[request] = "good"
        digests = tuple(DIGESTS[item % len(DIGESTS)] for item in items)
        self.frontends[frontend % len(self.frontends)].submit(worker % len(self.workers), request, digests)

    def deliver(self, which: int) -> bool:
        """Deliver one message or feature; whether there was one."""
        ways: list[Callable[[], None]] = []
        for (f, w), session in self.sessions.items():
            if session.to_worker:
                ways.append(partial(self._to_worker, f, w))
            if session.to_frontend:
                ways.append(partial(self._to_frontend, f, w))
            ways += [partial(self._bulk, f, w, transfer) for transfer in session.bulk if transfer.after <= session.read]
        if ways:
            ways[which % len(ways)]()
        return bool(ways)

    def _to_worker(self, frontend: int, worker: int) -> None:
        session = self.sessions[frontend, worker]
        session.read += 1
        self.workers[worker].read(frontend, session.to_worker.popleft())

    def _to_frontend(self, frontend: int, worker: int) -> None:
        self.frontends[frontend].read(worker, self.sessions[frontend, worker].to_frontend.popleft())

    def _bulk(self, frontend: int, worker: int, transfer: Transfer) -> None:
        self.sessions[frontend, worker].bulk.remove(transfer)
        intake = self.workers[worker].intake
        for request in intake.arrive(frontend, transfer.digest, FEATURES[transfer.digest]):
            assert intake.is_ready(frontend, request)

    def send_out(self, which: int) -> None:
        """The last byte of a feature leaves its frontend."""
        transfers = [
            transfer for session in self.sessions.values() for transfer in session.bulk if not transfer.is_sent
        ]
        if transfers:
            transfers[which % len(transfers)].is_sent = True

    def engine_submits(self, which: int) -> bool:
        """An engine takes a ready submission, or misses something; whether there was one."""
        return self._at_a_ready_one(which, Worker.submit)

    def engine_refuses(self, which: int) -> bool:
        return self._at_a_ready_one(which, Worker.refuse)

    def _at_a_ready_one(self, which: int, act: Callable[[Worker, Owner], None]) -> bool:
        ready = [(worker, owner) for worker in self.workers for owner in worker.ready()]
        if ready:
            act(*ready[which % len(ready)])
        return bool(ready)

    def engine_misses(self, which: int) -> None:
        running = [(worker, o) for worker in self.workers for o, (_, referred) in worker.running.items() if referred]
        if running:
            worker, owner = running[which % len(running)]
            worker.miss(owner)

    def finish(self, which: int) -> None:
        running = [(worker, owner) for worker in self.workers for owner in worker.running]
        if running:
            worker, owner = running[which % len(running)]
            del worker.running[owner]
            worker.say(owner[0], Ended(owner[1], "done"))

    def abort(self, which: int) -> None:
        wanted = [(frontend, request) for frontend in self.frontends for request in frontend.wanted]
        if wanted:
            frontend, request = wanted[which % len(wanted)]
            self.outcomes[request] = "given up"
            frontend.abort(request)

    def process_again(self, which: int) -> bool:
        """A frontend has processed what it had lost; whether one had to."""
        repairs = [(frontend, repair) for frontend in self.frontends for repair in frontend.repairs]
        if repairs:
            frontend, repair = repairs[which % len(repairs)]
            frontend.repairs.remove(repair)
            frontend.send(*repair)
        return bool(repairs)

    def lose_feature(self, frontend: int, item: int) -> None:
        self.frontends[frontend % len(self.frontends)].cache.discard(DIGESTS[item % len(DIGESTS)])

    def reset_session(self, which: int) -> None:
        frontend, worker = list(self.sessions)[which % len(self.sessions)]
        self._cut(frontend, worker)
        self.frontends[frontend].lose(worker)
        self.workers[worker].lose(frontend)
        if which % 2:  # the engine goes on while they do not hear of each other
            self.evict(worker, which)
            self.inject(worker, which)
        self._meet(frontend, worker)

    def crash_frontend(self, which: int) -> None:
        number = which % len(self.frontends)
        for worker in self.workers:
            self._cut(number, worker.number)
            worker.lose(number)
        self.frontends[number] = Frontend(self, number)
        self._meet(frontend=number)

    def crash_worker(self, which: int) -> None:
        number = which % len(self.workers)
        for frontend in self.frontends:
            self._cut(frontend.number, number)
            frontend.lose(number)
        self.workers[number] = Worker(self, number)
        self._meet(worker=number)

    def _cut(self, frontend: int, worker: int) -> None:
        for request, its in self.frontends[frontend].wanted.items():
            if its == worker:
                self.outcomes[request] = "given up"
        self.sessions[frontend, worker] = Session()

    def inject(self, worker: int, item: int) -> None:
        digest = DIGESTS[item % len(DIGESTS)]
        self.workers[worker % len(self.workers)].store.put(digest, FEATURES[digest])

    def evict(self, worker: int, which: int) -> None:
        store = self.workers[worker % len(self.workers)].store
        if store.items:
            store.evict(list(store.items)[which % len(store.items)])

    def reset(self, which: int) -> None:
        """An operator's reset, with whatever is in flight."""
        worker = self.workers[which % len(self.workers)]
        for digest in list(worker.store.items):
            worker.store.evict(digest)
        for frontend in self.frontends:
            worker.say(frontend.number, Forget())

    def announce(self, which: int) -> None:
        self.now += 1.0
        self.workers[which % len(self.workers)].announce()

    def send_slice(self, which: int) -> None:
        frontend, worker = list(self.sessions)[which % len(self.sessions)]
        self.workers[worker].send_slice(frontend)

    # What holds.

    def check(self) -> None:
        """What holds after every step."""
        for worker in self.workers:
            self._check_worker(worker)
        for frontend in self.frontends:
            for ledger, slow in zip(frontend.ledgers, frontend.slow, strict=True):
                assert ledger.unsettled == len(slow.counting)
                for digest in DIGESTS:
                    assert ledger.knows(digest) == slow.knows(digest)
                    assert ledger.holding(digest) == (HOLDINGS[digest] if digest in slow.announced else None)

    def _check_worker(self, worker: Worker) -> None:
        store, holdings, intake = worker.store, worker.holdings, worker.intake
        assert store.nbytes <= store.capacity
        assert (len(holdings), holdings.nbytes) == (len(store.items), store.nbytes)
        assert all(digest in holdings for digest in store.items)
        at_hand = {digest: feature for owner in worker.open for digest, feature in intake.features(*owner).items()}
        assert all(content_of(feature) == digest for digest, feature in at_hand.items())
        assert intake.nbytes == sum(feature.nbytes for feature in at_hand.values())
        assert len(intake) == len(worker.open)
        assert intake.waiting == len(worker.open) - len(worker.ready())
        assert intake.waiting == sum(
            bool(one.awaited) for each in intake._sessions.values() for one in each.requests.values()
        )
        assert intake._at_hand.keys() == at_hand.keys()
        assert intake._sessions.keys() == {frontend for frontend, _ in worker.open}

    def drain(self) -> None:
        """Let everything under way come to its end; then every good request was answered, and all agree."""
        for step in range(10_000):
            if not (self.process_again(0) or self.deliver(step) or self.engine_submits(step)):
                break
        for worker in self.workers:
            assert not worker.open, f"{sorted(worker.open)} wait for ever"
            worker.tell_the_rest()
        while self.deliver(0):
            pass
        self.check()
        for request, outcome in self.outcomes.items():
            assert outcome != "good" or self.taken[request] == 1, f"{request} was taken {self.taken[request]} times"
        for frontend in self.frontends:
            for worker, ledger, slow in zip(self.workers, frontend.ledgers, frontend.slow, strict=True):
                assert not (ledger._requests or ledger._counting or ledger._notes or slow.noted)
                assert {digest for digest in DIGESTS if ledger.knows(digest)} == worker.store.items.keys()
