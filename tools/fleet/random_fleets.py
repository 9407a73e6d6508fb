"""`python -m tools.fleet.random_fleets [FLEETS] [FIRST_SEED]`: random fleets, chosen from in two ways.

A fleet lives for some steps: workers come and go, announce and withdraw, are sent items, lose their sessions, and have
other loads. After every step both choose for a random request. The scan asks every worker; the shipped code asks the
directory. Loads, items and workers are few, so that ties and shared items are common, or many.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from random import Random

from semel.core import Digest, FeatureInfo, Layout
from semel.fleet.balance import Balance
from semel.fleet.pending import PendingRequests
from semel.ledger import Directory, Ledger
from tests.ledger.examples import gone, have
from tools.fleet.linear import Candidate, choose

STEPS = 10


@dataclass
class Worker:
    name: str
    ledger: Ledger
    pending: PendingRequests
    load: int
    announcements: int = 0
    requests: list[str] = field(default_factory=list)
    prepared: list[ExitStack] = field(default_factory=list)


class RandomFleet:
    """One fleet of a seed."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.max_load = self.random.choice((0, 3, 40))
        self.items = [Digest(self.random.randbytes(32)) for _ in range(self.random.choice((2, 8, 60)))]
        self.directory = Directory()
        self.balance = Balance()
        self.workers: dict[int, Worker] = {}
        self.named = 0
        for _ in range(self.random.choice((1, 2, 3, 10, 11, 12, 25, 40))):
            self.join()
        for _ in range(2 * len(self.workers)):
            self.step()

    # What happens.

    def step(self) -> None:
        step = self.random.choice(
            [self.join, self.leave, self.withdraw, self.send, self.settle, self.prepare, self.send_off, self.lose]
            + [self.announce, self.change_load] * 4
        )
        step()

    def join(self) -> None:
        ledger = Ledger(self.directory)
        ledger.open()
        self.named += 1
        worker = Worker(
            f"tcp://10.0.0.{self.named}:9000",
            ledger,
            PendingRequests(self.directory.pending, ledger.bit),
            self.random.randint(0, self.max_load),
        )
        self.workers[ledger.number] = worker
        self.balance.put(ledger.number, worker.name, worker.load)

    def leave(self) -> None:
        if len(self.workers) < 2:
            return
        number = self.random.choice(list(self.workers))
        worker = self.workers.pop(number)
        while worker.prepared:
            worker.prepared.pop().close()
        worker.ledger.move(Directory())
        self.balance.remove(number)

    def announce(self) -> None:
        worker = self._worker()
        info = FeatureInfo("image", 1, Layout((7,)))
        worker.ledger.announce(have(worker.announcements, dict.fromkeys(self._some(), info)))
        worker.announcements += 1

    def withdraw(self) -> None:
        worker = self._worker()
        worker.ledger.announce(gone(worker.announcements, self._some()))
        worker.announcements += 1

    def send(self) -> None:
        worker = self._worker()
        self.named += 1
        worker.ledger.submit(str(self.named), self._some())
        worker.requests.append(str(self.named))

    def settle(self) -> None:
        worker = self._worker()
        if worker.requests:
            worker.ledger.settle(worker.requests.pop())

    def prepare(self) -> None:
        worker = self._worker()
        stack = ExitStack()
        stack.enter_context(worker.pending.request(self._some()))
        worker.prepared.append(stack)

    def send_off(self) -> None:
        worker = self._worker()
        if worker.prepared:
            worker.prepared.pop().close()

    def lose(self) -> None:
        worker = self._worker()
        worker.ledger.open(b"another process")
        worker.ledger.forget()
        worker.announcements, worker.requests = 0, []

    def change_load(self) -> None:
        number = self.random.choice(list(self.workers))
        worker = self.workers[number]
        worker.load = self.random.randint(0, self.max_load)
        self.balance.set_load(number, worker.load)

    # Both choices.

    def compare(self) -> bool:
        """Whether a random request goes to the same worker by both."""
        digests = tuple(self._some()) if self.random.random() < 0.8 else ()
        prefix = self.random.choice((b"", self.random.randbytes(16), b"one conversation", b"one conversation"))
        numbers = list(self.workers)
        if self.random.random() < 0.3:  # some are ejected, or left out
            numbers = self.random.sample(numbers, self.random.randint(1, len(numbers)))
        among = sum(1 << number for number in numbers)
        chosen = self.balance.choose(among, digests, self.directory.holders(digests), prefix)
        candidates = [self._candidate(self.workers[number], digests) for number in numbers]
        return chosen == numbers[choose(candidates, digests, prefix)]

    def _candidate(self, worker: Worker, digests: tuple[Digest, ...]) -> Candidate:
        known = sum(worker.ledger.knows(digest) or digest in worker.pending for digest in digests)
        return Candidate(worker.name, worker.load, known)

    def _worker(self) -> Worker:
        return self.random.choice(list(self.workers.values()))

    def _some(self) -> list[Digest]:
        return self.random.sample(self.items, self.random.randint(1, min(8, len(self.items))))


def differing(fleets: int, first: int = 0) -> Iterator[int]:
    """The seeds of the fleets in which the two choices differ."""
    for seed in range(first, first + fleets):
        fleet = RandomFleet(seed)
        for _ in range(STEPS):
            fleet.step()
            if not fleet.compare():
                yield seed
                break


def main(fleets: int = 100_000, first: int = 0) -> None:
    found = list(differing(fleets, first))
    sys.stdout.write(f"{fleets:,} fleets of seeds from {first:,}: {len(found)} differ {found[:10] or ''}\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
