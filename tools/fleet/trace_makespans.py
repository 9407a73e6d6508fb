"""`python -m tools.fleet.trace_makespans [TRACES] [FIRST_SEED]`: large fleets next to round robin, on drawn traces.

The traces of `trace`, with 11 to 100 workers. They are simulated with one balance for each frontend, as in a process,
and not with one for each request: a hundred times as fast, and the same choices.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from heapq import heappop, heappush
from statistics import median

from semel.core import Digest
from semel.fleet.balance import Balance
from semel.fleet.ranking import Ranking
from semel.ledger import Holders
from tools.fleet.trace import AT_ONCE, BUSY, LAG_S, SHORT, Kind, Trace, draw

LARGE: dict[str, Kind] = {
    name: replace(kind, min_workers=11, max_workers=100)
    for name, kind in (("busy", BUSY), ("at once", AT_ONCE), ("short", SHORT))
}
MAX_RATIO, MAX_SHARE = 1.05, 0.001


class _Frontend:
    """The state of one frontend."""

    def __init__(self, ranking: Ranking, workers: int, balance: type[Balance]) -> None:
        self.balance = balance(ranking)
        self.held = Holders()
        self.loads = [0] * workers
        for worker in range(workers):
            self.balance.put(worker, f"tcp://10.0.0.{worker}:9000")

    def learn(self, worker: int, change: int, items: tuple[Digest, ...]) -> None:
        self.loads[worker] += change
        self.balance.set_load(worker, self.loads[worker])
        self.held.update(items, 1 << worker)


class _Once(Ranking):
    """A ranking that many balances of the same workers share."""

    def put(self, number: int, name: str) -> None:
        if number not in self._names:
            super().put(number, name)


def makespan(trace: Trace, balance: type[Balance] = Balance) -> float:
    """Return how long all of it takes if frontends choose as they do."""
    workers, ranking = len(trace.paces), _Once(max_keys=1 << 20)
    frontends = [_Frontend(ranking, workers, balance) for _ in range(trace.frontends)]
    everybody = (1 << workers) - 1
    encoded: list[set[Digest]] = [set() for _ in range(workers)]
    met: list[set[bytes]] = [set() for _ in range(workers)]
    free = [0.0] * workers
    updates: list[tuple[float, int, int, int, int, tuple[Digest, ...]]] = []
    for number, request in enumerate(trace.requests):
        while updates and updates[0][0] <= request.at:
            _, _, place, worker, change, items = heappop(updates)
            frontends[place].learn(worker, change, items)
        ours = frontends[request.frontend]
        held = [workers for item in request.items if (workers := ours.held.get(item))]
        worker = ours.balance.choose(everybody, request.items, held, request.talk)
        new, cold = sum(item not in encoded[worker] for item in request.items), request.talk not in met[worker]
        encoded[worker].update(request.items)
        met[worker].add(request.talk)
        work_s = request.answer_s + new * trace.encode_s + cold * trace.prefill_s
        free[worker] = end = trace.paces[worker].end(max(free[worker], request.at), work_s)
        for place, frontend in enumerate(frontends):
            if frontend is ours:
                frontend.learn(worker, 1, request.items)
                heappush(updates, (end, number, place, worker, -1, ()))
            else:
                heappush(updates, (request.at + LAG_S, number, place, worker, 1, request.items))
                heappush(updates, (end + LAG_S, number, place, worker, -1, ()))
    return max(free)


def round_robin_makespan(trace: Trace) -> float:
    """Return the makespan if requests go to one worker after another."""
    workers = len(trace.paces)
    seen: list[set[bytes]] = [set() for _ in range(workers)]
    free = [0.0] * workers
    for number, request in enumerate(trace.requests):
        worker = number % workers
        new = sum(item not in seen[worker] for item in request.items)
        work_s = request.answer_s + new * trace.encode_s + (request.talk not in seen[worker]) * trace.prefill_s
        seen[worker].update((*request.items, request.talk))
        free[worker] = trace.paces[worker].end(max(free[worker], request.at), work_s)
    return max(free)


def ratios(kind: Kind, count: int, first: int = 0, balance: type[Balance] = Balance) -> Iterator[float]:
    """Yield the makespans of traces over those of round robin."""
    for seed in range(first, first + count):
        trace = draw(seed, kind)
        yield makespan(trace, balance) / round_robin_makespan(trace)


def main(count: int = 3_000, first: int = 0) -> None:
    """A third of each kind. Exits with 1 if more than 1 of 1,000 takes over 1.05 of round robin's time."""
    out, found = sys.stdout.write, list[float]()
    out(
        "| traces of 11 to 100 workers | makespan over round robin's, median | worst | over 1.05 |\n|---|---|---|---|\n"
    )
    for name, kind in LARGE.items():
        some = list(ratios(kind, count // len(LARGE), first))
        found += some
        out(f"| {name}, {len(some):,} | {median(some):.3f} | {max(some):.3f} | {sum(x > MAX_RATIO for x in some)} |\n")
        sys.stdout.flush()
    over = sum(ratio > MAX_RATIO for ratio in found)
    out(f"| all, {len(found):,} | {median(found):.3f} | {max(found):.3f} | {over} |\n")
    sys.exit(over > MAX_SHARE * len(found))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
