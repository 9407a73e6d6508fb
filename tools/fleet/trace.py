"""A fleet under a virtual clock: seeded traces of requests, and how long workers take over them if they are chosen so.

A worker is one server with a queue: what it has got it does in order, at its own pace, which may change once. Work that
waits is work that lasts, so nothing is easier on a choice that is uneven than a real engine, which batches. A request
costs its answer, the encoding of each item that its worker has not seen, and the prefill of a conversation that its
worker has not seen. Each frontend knows of its own requests at once, and of the others' after a lag.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from random import Random
from typing import NamedTuple

from semel.core import Digest
from tools.fleet.linear import Candidate, choose, shipped

LAG_S = 0.02
"""How old what workers announce may be: they tell their load at most every 20 ms."""


@dataclass(frozen=True)
class Kind:
    """What traces are drawn from."""

    pressures: tuple[float, ...]
    """Work that arrives, over what the workers could do if none were slow."""

    max_workers: int = 6
    requests: tuple[int, int] = (60, 100)
    """For each worker, from and to."""

    spreads: tuple[float, ...] = (0.0, 0.3, 0.6)
    """How uneven answers are: sigma of a lognormal length."""

    bursts: tuple[int, ...] = (1, 4, 16)
    slowest: float = 0.25
    min_workers: int = 2


BUSY = Kind((0.5, 0.7, 0.9, 1.1, 1.5))
AT_ONCE = Kind((3.0, 1e6))
"""More than they can do: the requests have all come before most are answered."""

SHORT = Kind((0.5, 0.7, 0.9, 1.1, 1.5), 8, (12, 60), (0.0, 0.3, 0.8), (1, 8, 32), 0.2)
"""Over before chance evens out, and more uneven."""


class Request(NamedTuple):
    at: float
    frontend: int
    items: tuple[Digest, ...]
    talk: bytes
    """Its conversation."""

    answer_s: float


@dataclass(frozen=True)
class Pace:
    """How fast a worker works: 1.0 is as work is measured. From some moment on it may be another pace."""

    speed: float = 1.0
    until: float = inf
    then: float = 1.0

    def end(self, begin: float, work_s: float) -> float:
        done = max(0.0, self.until - begin) * self.speed
        if work_s <= done:
            return begin + work_s / self.speed
        return max(begin, self.until) + (work_s - done) / self.then


@dataclass(frozen=True)
class Trace:
    paces: tuple[Pace, ...]
    frontends: int
    encode_s: float
    prefill_s: float
    requests: tuple[Request, ...]

    @property
    def distinct_items(self) -> int:
        return len({item for request in self.requests for item in request.items})

    @property
    def talks(self) -> int:
        return len({request.talk for request in self.requests})


@dataclass(frozen=True)
class View:
    """What one frontend knows of the workers when it has to choose."""

    names: Sequence[str]
    loads: list[int]
    held: list[set[Digest]]


Policy = Callable[[int, View, Request], int]
"""The worker for a request, given its number."""


@dataclass(frozen=True)
class Outcome:
    makespan_s: float
    encodes: int
    prefills: int


def round_robin(number: int, view: View, request: Request) -> int:
    return number % len(view.loads)


def least_busy(number: int, view: View, request: Request) -> int:
    return min(range(len(view.loads)), key=lambda worker: view.loads[worker])


def balanced(number: int, view: View, request: Request) -> int:
    """What frontends do."""
    return shipped(_candidates(view, request), request.items, request.talk)


def scanned(number: int, view: View, request: Request) -> int:
    """The same, worker by worker."""
    return choose(_candidates(view, request), request.items, request.talk)


def _candidates(view: View, request: Request) -> list[Candidate]:
    known = (sum(item in held for item in request.items) for held in view.held)
    return [Candidate(*one) for one in zip(view.names, view.loads, known, strict=True)]


def draw(seed: int, kind: Kind = BUSY) -> Trace:
    """A trace with hot items and with workers that are slow or turn slow."""
    random = Random(seed)
    workers = random.randint(kind.min_workers, kind.max_workers)
    count = workers * random.randint(*kind.requests)
    encode_s, prefill_s = random.uniform(0.2, 1.5), random.uniform(0.0, 0.5)
    rate = random.choice(kind.pressures) * workers / (1.0 + 0.3 * encode_s + 0.5 * prefill_s)
    paces = [Pace()] * workers
    for worker in random.sample(range(workers), random.randint(1, max(1, workers // 2))):
        slow = random.uniform(kind.slowest, 0.9)
        turns = random.uniform(0.1, 0.9) * count / rate
        paces[worker] = random.choice((Pace(slow), Pace(1.0, turns, slow)))
    frontends = random.randint(1, 3)
    requests = _requests(random, kind, count, rate, frontends)
    return Trace(tuple(paces), frontends, encode_s, prefill_s, requests)


def _requests(random: Random, kind: Kind, count: int, rate: float, frontends: int) -> tuple[Request, ...]:
    """Half are later turns of one of the last 30 conversations. They come alone or in bursts, with uneven answers."""
    catalogue, skew = random.randint(5, 100), random.uniform(0.6, 1.6)
    weights = [(rank + 1) ** -skew for rank in range(catalogue)]
    items = [Digest(random.randbytes(32)) for _ in range(catalogue)]
    without_items, spread, burst = (
        random.choice((0.0, 0.2, 0.5)),
        random.choice(kind.spreads),
        random.choice(kind.bursts),
    )
    talks: list[tuple[bytes, tuple[Digest, ...]]] = []
    requests = []
    at = 0.0
    for number in range(count):
        if number % burst == 0:
            at += random.expovariate(rate) * burst
        if not talks or random.random() < 0.5:
            shown = 0 if random.random() < without_items else random.choice((1, 1, 1, 2, 4))
            talks.append((random.randbytes(16), tuple(dict.fromkeys(random.choices(items, weights, k=shown)))))
            talk = talks[-1]
        else:
            talk = random.choice(talks[-30:])
        answer_s = random.lognormvariate(-(spread**2) / 2, spread)
        requests.append(Request(at, random.randrange(frontends), talk[1], talk[0], answer_s))
    return tuple(requests)


def simulate(trace: Trace, policy: Policy) -> Outcome:
    """How long all of it takes, and what was done more than once."""
    workers = range(len(trace.paces))
    names = [f"tcp://10.0.0.{worker}:9000" for worker in workers]
    views = [View(names, [0 for _ in workers], [set() for _ in workers]) for _ in range(trace.frontends)]
    free = [0.0 for _ in workers]
    encoded: list[set[Digest]] = [set() for _ in workers]
    met: list[set[bytes]] = [set() for _ in workers]
    encodes = prefills = 0
    updates: list[tuple[float, int, int, int, int, tuple[Digest, ...]]] = []
    """When which frontend learns of which worker how its load has changed and what it holds."""

    for number, request in enumerate(trace.requests):
        while updates and updates[0][0] <= request.at:
            _, _, frontend, worker, change, items = heappop(updates)
            views[frontend].loads[worker] += change
            views[frontend].held[worker].update(items)
        worker = policy(number, views[request.frontend], request)
        new, cold = sum(item not in encoded[worker] for item in request.items), request.talk not in met[worker]
        encoded[worker].update(request.items)
        met[worker].add(request.talk)
        encodes, prefills = encodes + new, prefills + cold
        work_s = request.answer_s + new * trace.encode_s + cold * trace.prefill_s
        free[worker] = end = trace.paces[worker].end(max(free[worker], request.at), work_s)
        for frontend, view in enumerate(views):
            if frontend == request.frontend:
                view.loads[worker] += 1
                view.held[worker].update(request.items)
                heappush(updates, (end, number, frontend, worker, -1, ()))
            else:
                heappush(updates, (request.at + LAG_S, number, frontend, worker, 1, request.items))
                heappush(updates, (end + LAG_S, number, frontend, worker, -1, ()))
    return Outcome(max(free), encodes, prefills)
