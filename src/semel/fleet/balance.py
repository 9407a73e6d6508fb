"""The choice of a worker for a request: pure, by digests, prefix, holders and loads, so that all frontends agree.

A worker that is busier than a bound over the least busy ones is passed over; the bound is wider for one that holds
some of the items. Of the others those that hold most of the items are taken, and of these the two that the request's
key ranks highest (by a hash of worker and key): the less busy of the two gets it. What nobody holds is ranked by its
digest, so that equal new items of different frontends meet; all else by the opening of its conversation, so that the
next turn goes where the prefix is. A worker that comes or goes moves only what it wins or had.

The bound stands over the load that a tenth of the workers do not reach, not over the least of all: of many workers
somebody is always idle, because it has just come or fails at once, and must not draw everybody's requests. Of up to
ten workers it is the least.

No speeds are known here: a worker that is slow shows it by what it has not answered yet (docs/deploy/fleet.md).

No worker is looked at by itself. Sets of workers are integers with a bit for each (`semel.ledger.Directory`), and
workers with the same load are one set. So a choice costs the request's items and the distinct loads, and not the number
of workers, but for a key that was not asked for before (`Ranking`).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from semel.core import Digest
from semel.fleet.ranking import Ranking

__all__ = ["Balance"]

_ALWAYS: Final = 3  # requests over the least busy that never count as busy: small numbers differ by chance
_TENTH: Final = 10
_SLACK: Final = 0.1  # of the mean, in addition

# Of the mean, and requests at the most, for a worker that holds some of the items: elsewhere they are encoded again.
# Without a limit, hot items crowd one worker while many requests wait.
_HOLDER_SLACK: Final = 0.4
_HOLDER_MOST: Final = 2


class Balance:
    """The workers of one frontend by their numbers, and their loads: requests that they are answering or about to."""

    def __init__(self, ranking: Ranking | None = None) -> None:
        self._ranking = ranking or Ranking()
        self._loads: dict[int, int] = {}
        self._everybody = 0
        self._total = 0  # of all loads
        self._levels: dict[int, int] = {}  # by load, the set of workers that have it
        self._order: list[int] = []  # these loads, lowest first

    def put(self, number: int, name: str, load: int = 0) -> None:
        """Add a worker."""
        self._ranking.put(number, name)
        self._loads[number] = load
        self._add(load, 1 << number)

    def remove(self, number: int) -> None:
        """Remove a worker."""
        self._ranking.remove(number)
        self._take(self._loads.pop(number), 1 << number)

    def set_load(self, number: int, load: int) -> None:
        """Set the load of a worker."""
        before = self._loads[number]
        if before != load:
            self._loads[number] = load
            self._take(before, 1 << number)
            self._add(load, 1 << number)

    def choose(self, among: int, digests: Sequence[Digest], holders: Sequence[int], prefix: bytes = b"") -> int:
        """Return the number of the worker to send a request with these items to.

        `among` is the set of workers that may be chosen, and not empty. `holders` are the sets of those that have an
        item, for each item that anybody has. `prefix` stands for the opening of the conversation (at most 64 bytes);
        empty if there is none to speak of.
        """
        # The items of a conversation are mostly at the same workers.
        alike = bool(holders) and holders.count(holders[0]) == len(holders)
        items = {holders[0]: len(holders)} if alike else Counter(holders)
        best, most = _best(self._fit(among, items), items)
        if not best & (best - 1):
            return best.bit_length() - 1
        key = (prefix if most or not digests else b"") or min(digests, default=b"")
        if key:
            two = self._ranking.top(key, best, 2)
            return min(two, key=self._loads.__getitem__)
        return self._ranking.top(key, self._least_busy(best), 1)[0]

    def best_holders(self, among: int, holders: Sequence[int]) -> int:
        """Return the least busy of those workers that hold most items; `holders` as in `choose`."""
        best, _ = _best(among, Counter(holders))
        return self._least_busy(best)

    def _least_busy(self, among: int) -> int:
        return next(level for load in self._order if (level := self._levels[load] & among))

    def _fit(self, among: int, holders: Iterable[int]) -> int:
        """Return those that are not too busy: within the bound, or within the wider one and a holder."""
        bound, holders_bound = self._bounds(among)
        order, levels = self._order, self._levels
        within, within_wider = bisect_right(order, bound), bisect_right(order, holders_bound)
        fit = 0
        for load in order[:within]:
            fit |= levels[load]
        if within < within_wider:
            holding = 0
            for workers in holders:
                holding |= workers
            for load in order[within:within_wider]:
                fit |= levels[load] & holding
        return fit & among

    def _bounds(self, among: int) -> tuple[float, float]:
        """Return the load above which a worker is passed over: one that holds no item, and one that holds some."""
        number, total = among.bit_count(), self._total
        if among != self._everybody:
            total = sum(load * (workers & among).bit_count() for load, workers in self._levels.items())
        rest = (number - 1) // _TENTH
        least = 0
        for least in self._order:
            if (rest := rest - (self._levels[least] & among).bit_count()) < 0:
                break
        bound = least + _ALWAYS + _SLACK * total / number
        return bound, bound + min(_HOLDER_SLACK * total / number, _HOLDER_MOST)

    def _add(self, load: int, bit: int) -> None:
        if load not in self._levels:
            self._levels[load] = 0
            insort(self._order, load)
        self._levels[load] |= bit
        self._everybody |= bit
        self._total += load

    def _take(self, load: int, bit: int) -> None:
        self._levels[load] &= ~bit
        self._everybody &= ~bit
        self._total -= load
        if not self._levels[load]:
            del self._levels[load]
            self._order.remove(load)


def _best(fit: int, items: Mapping[int, int]) -> tuple[int, int]:
    """Return the workers that hold most items, and how many; `items` are numbers of items by the set of their holders.

    The numbers are added up for all workers at once: bit i of every worker's number is in `sums[i]`.
    """
    sums: list[int] = []
    for workers, count in items.items():
        if holding := workers & fit:
            for place in range(count.bit_length()):
                if count >> place & 1:
                    _add_at(sums, place, holding)
    most = 0
    for place in reversed(range(len(sums))):
        if highest := fit & sums[place]:
            fit = highest
            most += 1 << place
    return fit, most


def _add_at(sums: list[int], place: int, workers: int) -> None:
    """Add 2 to the power of `place` to the number of each of these workers."""
    while workers:
        if place >= len(sums):
            sums += [0] * (place - len(sums) + 1)
        sums[place], workers = sums[place] ^ workers, sums[place] & workers
        place += 1
