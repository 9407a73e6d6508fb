"""The knowledge of a simulated fleet's frontends, and their choice: with the shipped `Balance`, pending requests,
retry policy and ejection.

A thousand balances of a thousand workers would have to hear of every worker four times a second. All frontends get
the same at the same time, so they share one balance. A frontend knows better only of the workers that it has requests
at: those loads are put in before it chooses, and taken out again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from semel.core import Digest, LruMap
from semel.fleet.balance import Balance
from semel.fleet.pending import PendingRequests
from semel.fleet.ranking import Ranking
from semel.fleet.retry_policy import FleetHealth
from semel.lab.simulate.workload import Item
from semel.ledger import Holders

__all__ = ["CacheUpdates", "FleetView", "FrontendView", "Link", "QuickRanking", "SharedRanking", "name_of", "number_of"]

_KEYS: Final = 1 << 20
_MASK: Final = (1 << 64) - 1
_STEPS: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_WORDS: Final = tuple((np.uint64(shift), np.uint64(factor)) for shift, factor in _STEPS)
_LAST: Final = np.uint64(31)
_FEW: Final = 8


class SharedRanking(Ranking):
    """The shipped ranking. Those who left stay in it: some frontends may not know yet that they did."""

    def __init__(self) -> None:
        super().__init__(max_keys=_KEYS)

    def put(self, number: int, name: str) -> None:
        """A worker comes."""
        if number not in self._names:
            super().put(number, name)

    def remove(self, number: int) -> None:
        """A worker goes."""


class QuickRanking(SharedRanking):
    """The same with another hash, of all workers at once: of a thousand in 30 µs instead of 1,100.

    What is ranked how high is as much by chance as with the shipped hash.
    """

    def __init__(self) -> None:
        super().__init__()
        self._salts: np.ndarray[Any, np.dtype[np.uint64]] = np.zeros(0, np.uint64)
        self._all: np.ndarray[Any, np.dtype[np.int64]] = np.zeros(0, np.int64)

    def put(self, number: int, name: str) -> None:
        """A worker comes."""
        super().put(number, name)
        if number >= len(self._salts):
            salts = (_mixed(0x9E3779B97F4A7C15 * (one + 1) & _MASK) for one in range(2 * number + 16))
            self._salts = np.fromiter(salts, np.uint64)

    def _ranked(self, key: bytes, numbers: Iterable[int], count: int) -> list[int]:
        if numbers is self._names:
            if len(self._all) != len(self._names):
                self._all = np.array(list(self._names), np.int64)
            return self._top(key, self._all, count)
        listed = list(numbers)
        if len(listed) <= _FEW:
            word = int.from_bytes(key[:8], "big")
            return sorted(listed, key=lambda number: _mixed(int(self._salts[number]) ^ word), reverse=True)[:count]
        return self._top(key, np.array(listed, np.int64), count)

    def _top(self, key: bytes, at: np.ndarray[Any, np.dtype[np.int64]], count: int) -> list[int]:
        scores = self._salts[at] ^ np.uint64(int.from_bytes(key[:8], "big"))
        for shift, factor in _WORDS:
            scores ^= scores >> shift
            scores *= factor
        scores ^= scores >> _LAST
        top = scores.argpartition(-count)[-count:] if count < len(at) else np.arange(len(at))
        found: list[int] = at[top[scores[top].argsort()[::-1]]].tolist()
        return found


def _mixed(word: int) -> int:
    """Splitmix64's last steps: every bit of the result depends on every bit of the word."""
    for shift, factor in _STEPS:
        word = (word ^ word >> shift) * factor & _MASK
    return word ^ word >> 31


class CacheUpdates:
    """The changes of all workers, and how far everybody knows of them."""

    def __init__(self, workers: int) -> None:
        self.announced = Holders()
        self._number = [0] * workers
        self._recent: list[dict[Digest, list[tuple[int, bool]]]] = [{} for _ in range(workers)]
        """By digest, the changes that not everybody was sent: their numbers, and whether it is held since."""

    def number(self, worker: int) -> int:
        """Return the number of a worker's last change."""
        return self._number[worker]

    def hold(self, worker: int, digest: Digest) -> None:
        """A worker holds an item from now on."""
        self._change(worker, digest, True)

    def drop(self, worker: int, digest: Digest) -> None:
        """A worker no longer holds an item."""
        self._change(worker, digest, False)

    def _change(self, worker: int, digest: Digest, is_present: bool) -> None:
        self._number[worker] += 1
        self._recent[worker].setdefault(digest, []).append((self._number[worker], is_present))

    def publish(self, worker: int) -> tuple[int, int]:
        """Send everybody a worker's changes. Returns how many items it has now, and how many no more."""
        recent, bit = self._recent[worker], 1 << worker
        have = gone = 0
        for digest, changes in recent.items():
            was_present = bool(self.announced.get(digest) & bit)
            if changes[-1][1] and not was_present:
                self.announced.add(digest, bit)
                have += 1
            elif was_present and not changes[-1][1]:
                self.announced.discard(digest, bit)
                gone += 1
        recent.clear()
        return have, gone

    def holders(self, digest: Digest, ahead: Mapping[int, int]) -> int:
        """Return the workers that hold an item, for a frontend that knows of some up to these numbers."""
        workers = self.announced.get(digest)
        for worker, number in ahead.items():
            if changes := self._recent[worker].get(digest):
                bit = 1 << worker
                for changed, is_present in changes:
                    if changed <= number:
                        workers = workers | bit if is_present else workers & ~bit
        return workers

    def holds(self, worker: int, digest: Digest, number: int) -> bool:
        """Return whether a worker holds an item, for a frontend that was informed of it up to this number."""
        found = bool(self.announced.get(digest) >> worker & 1)
        for changed, is_present in self._recent[worker].get(digest, ()):
            if changed <= number:
                found = is_present
        return found

    def clear(self, worker: int, digests: Iterable[Digest]) -> None:
        """A worker is gone, with all that it held: everybody sees that its session has ended."""
        for digest in digests:
            self.announced.discard(digest, 1 << worker)
        for digest in self._recent[worker]:
            self.announced.discard(digest, 1 << worker)
        self._recent[worker].clear()


_EXACT: Final = 256
"""Up to so many workers are ranked by the shipped hash: of more that would take most of a run."""


def name_of(worker: int) -> str:
    """Return where a worker listens."""
    return f"tcp://10.{worker >> 16}.{worker >> 8 & 255}.{worker & 255}:9000"


class Link:
    """A frontend's own knowledge of one worker, beyond what everybody was sent."""

    __slots__ = ("number", "others", "pending", "sent", "unanswered")

    def __init__(self, frontend: FrontendView, worker: int, others: int) -> None:
        self.others = others
        """Requests of others, as last reported."""

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
        """Return what a frontend knows of a worker by itself, from now on."""
        if (link := frontend.links.get(worker)) is None:
            link = frontend.links[worker] = Link(frontend, worker, self.known_load[worker])
            self._peers[worker][frontend] = link
        return link

    def tell(self, worker: int, running: int) -> tuple[int, int]:
        """Send everybody what a worker has. Returns how many items are new to them, and how many gone."""
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
        return self.updates.publish(worker)

    def tell_one(self, frontend: FrontendView, worker: int, running: int) -> None:
        """Inform a frontend at once, with an answer of the worker to it."""
        if (link := frontend.links.get(worker)) is not None:
            link.hear(running)
            link.number = frontend.ahead[worker] = self.updates.number(worker)

    def holders(self, frontend: FrontendView, digest: Digest) -> int:
        """Return the workers that have an item, or are about to get it from this frontend."""
        found = self.updates.holders(digest, frontend.ahead)
        return found | frontend.sent.get(digest) | frontend.pending.get(digest)

    def knows(self, frontend: FrontendView, worker: int, digest: Digest) -> bool:
        """Return whether a request may name an item without sending it."""
        is_sent = frontend.sent.get(digest) >> worker & 1
        return bool(is_sent) or self.updates.holds(worker, digest, frontend.ahead.get(worker, 0))

    def choose(
        self, frontend: FrontendView, digests: Sequence[Digest], prefix: bytes = b"", *, without: int = 0
    ) -> int | None:
        """Return the worker for a request, as `Fleet.choose` finds it; None if nobody serves."""
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
    """Return the worker that listens there."""
    high, middle, low = map(int, name.removeprefix("tcp://10.").removesuffix(":9000").split("."))
    return high << 16 | middle << 8 | low
