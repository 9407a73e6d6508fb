"""What the frontends of a simulated fleet know, and how they choose: with the shipped `Balance`, pending requests,
failover and ejection.

A thousand balances of a thousand workers would have to hear of every worker four times a second. All frontends are told
the same at the same time, so they share one balance. A frontend knows better only of the workers that it has requests
at: those loads are put in before it chooses, and taken out again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from semel.core import Digest, LruMap
from semel.fleet.balance import Balance
from semel.fleet.failover import FleetHealth
from semel.fleet.pending import PendingRequests
from semel.fleet.ranking import Ranking
from semel.lab.simulate.cache_updates import CacheUpdates
from semel.lab.simulate.rankings import QuickRanking, SharedRanking
from semel.lab.simulate.workload import Item
from semel.ledger import Holders

__all__ = ["FleetView", "FrontendView", "Link", "name_of", "number_of"]


_EXACT: Final = 256
"""Up to so many workers are ranked by the shipped hash: of more that would take most of a run."""


def name_of(worker: int) -> str:
    """Where a worker listens."""
    return f"tcp://10.{worker >> 16}.{worker >> 8 & 255}.{worker & 255}:9000"


class Link:
    """What a frontend knows of one worker beyond what everybody was told."""

    __slots__ = ("number", "others", "pending", "sent", "unanswered")

    def __init__(self, frontend: FrontendView, worker: int, others: int) -> None:
        self.others = others
        """Requests of others, as last told."""

        self.unanswered = 0
        self.number = 0
        """Of the worker's changes that came with an answer; 0 if everybody knows as much."""

        self.pending = PendingRequests(frontend.pending, 1 << worker)
        self.sent = PendingRequests(frontend.sent, 1 << worker)
        """Items on their way, until their request is taken."""

    @property
    def load(self) -> int:
        """As `Fleet.load` counts it, but for failures."""
        return self.others + self.unanswered + self.pending.requests

    def hear(self, running: int) -> None:
        """The worker tells how many requests it has."""
        self.others = max(0, running - self.unanswered)


class FrontendView:
    """One frontend: its links, its feature cache, and what its event loop and its pool are busy with until when."""

    __slots__ = (
        "ahead",
        "features",
        "free_s",
        "health",
        "links",
        "making",
        "number",
        "pending",
        "pool",
        "sent",
        "turn",
    )

    def __init__(self, cache_bytes: int, processes: int, health: FleetHealth | None) -> None:
        self.links: dict[int, Link] = {}
        self.ahead: dict[int, int] = {}
        """By worker, the number of its changes that this frontend knows of, where that is more than others know."""

        self.pending = Holders()
        self.sent = Holders()
        self.features: LruMap[Digest, Item] = LruMap(cache_bytes, lambda item: item.nbytes)
        self.making: dict[Digest, float] = {}
        self.free_s = 0.0
        self.pool = [0.0] * processes
        self.health = health
        self.turn = 0


class FleetView:
    """All frontends and what they know."""

    def __init__(self, workers: int, balance: Callable[[Ranking], Balance] = Balance) -> None:
        self.updates = CacheUpdates(workers)
        self.serving = 0
        """The set of workers that serve."""

        self._names: set[str] = set()
        """Of those."""

        self.known_load = [0] * workers
        self._balance = balance(SharedRanking() if workers <= _EXACT else QuickRanking())
        self._peers: list[dict[FrontendView, Link]] = [{} for _ in range(workers)]

    def join(self, worker: int) -> None:
        """A worker serves from now on."""
        self.serving |= 1 << worker
        self._names.add(name_of(worker))
        self.known_load[worker] = 0
        self._balance.put(worker, name_of(worker))

    def leave(self, worker: int, items: Sequence[Digest]) -> None:
        """A worker is lost with all that it has: everybody sees it."""
        self.serving &= ~(1 << worker)
        self._names.discard(name_of(worker))
        self._balance.remove(worker)
        self.updates.clear(worker, items)
        for frontend in self._peers[worker]:
            del frontend.links[worker]
            frontend.ahead.pop(worker, None)
        self._peers[worker].clear()

    def link(self, frontend: FrontendView, worker: int) -> Link:
        """What a frontend knows of a worker by itself, from now on."""
        if (link := frontend.links.get(worker)) is None:
            link = frontend.links[worker] = Link(frontend, worker, self.known_load[worker])
            self._peers[worker][frontend] = link
        return link

    def tell(self, worker: int, running: int) -> tuple[int, int]:
        """Everybody is told what a worker has. Returns how many items are new to them, and how many gone."""
        self.known_load[worker] = running
        if self.serving >> worker & 1:
            self._balance.set_load(worker, running)
        peers = self._peers[worker]
        idle = []
        for frontend, link in peers.items():
            link.hear(running)
            if link.number:
                link.number = 0
                frontend.ahead.pop(worker, None)
            if not link.unanswered and not link.pending.requests:
                idle.append(frontend)
        for frontend in idle:
            del peers[frontend], frontend.links[worker]
        return self.updates.tell(worker)

    def tell_one(self, frontend: FrontendView, worker: int, running: int) -> None:
        """A frontend is told at once, with an answer of the worker to it."""
        if (link := frontend.links.get(worker)) is not None:
            link.hear(running)
            link.number = frontend.ahead[worker] = self.updates.number(worker)

    def holders(self, frontend: FrontendView, digest: Digest) -> int:
        """The workers that have an item, or are about to get it from this frontend."""
        found = self.updates.holders(digest, frontend.ahead)
        return found | frontend.sent.get(digest) | frontend.pending.get(digest)

    def knows(self, frontend: FrontendView, worker: int, digest: Digest) -> bool:
        """Whether a request may name an item without sending it."""
        is_sent = frontend.sent.get(digest) >> worker & 1
        return bool(is_sent) or self.updates.holds(worker, digest, frontend.ahead.get(worker, 0))

    def choose(
        self, frontend: FrontendView, digests: Sequence[Digest], prefix: bytes = b"", *, without: int = 0
    ) -> int | None:
        """The worker for a request, as `Fleet.choose` finds it; None if nobody serves."""
        serving = self.serving & ~without
        if not serving:
            return None
        health = frontend.health
        among = serving
        if health is not None and health.has_ejected:
            among = serving & ~self._left_out(frontend, health) or serving
        if among.bit_count() == 1:
            return among.bit_length() - 1
        balance, known = self._balance, self.known_load
        own = {  # `link.load` is spelt out: a hundredth of the time of a run
            worker: load
            for worker, link in frontend.links.items()
            if (load := link.others + link.unanswered + link.pending.requests) != known[worker]
        }
        if health is not None:
            for name in tuple(health.charged):
                worker = number_of(name)
                own[worker] = own.get(worker, known[worker]) + health.load(name)
            own = {worker: load for worker, load in own.items() if self.serving >> worker & 1}
        for worker, load in own.items():
            balance.set_load(worker, load)
        holders = [workers for digest in digests if (workers := self.holders(frontend, digest))]
        chosen = balance.choose(among, digests, holders, prefix)
        for worker in own:
            balance.set_load(worker, known[worker])
        return chosen

    def _left_out(self, frontend: FrontendView, health: FleetHealth) -> int:
        def is_preparing(name: str) -> bool:
            link = frontend.links.get(number_of(name))
            return link is not None and link.pending.requests > 0

        return sum(1 << number_of(name) for name in health.left_out(self._names, is_preparing))


def number_of(name: str) -> int:
    """The worker that listens there."""
    high, middle, low = map(int, name.removeprefix("tcp://10.").removesuffix(":9000").split("."))
    return high << 16 | middle << 8 | low
