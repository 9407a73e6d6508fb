"""Which reclaimable entry goes first: the policies of `Residency`, and the entries they choose among.

A policy holds the entries that nobody refers to, its candidates, and nothing else. Residency asks it while making room.
`OldestReleased` and `Immediate` are O(1) per call, `CostAware` is O(log n) amortised.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from heapq import heappop, heappush
from typing import Protocol

__all__ = ["CostAware", "Entry", "Eviction", "Immediate", "Key", "OldestReleased", "Reference"]

Key = Hashable
"""What an encoder output is kept under; semel uses digests."""

Reference = tuple[str, int]
"""One input of one request: `(request, index)`."""


class Entry:
    """One encoder output that is resident, or planned to be by the end of the step."""

    __slots__ = ("cost", "is_adopted", "key", "planner", "referrers", "shows", "size")

    def __init__(self, key: Key, size: int, cost: float, planner: Reference) -> None:
        self.key = key
        self.size = size
        """In embeddings."""
        self.cost = cost
        """What encoding it again would cost, in any unit that is the same for all entries."""
        self.shows = 0
        """How often it was shown, for policies that count it."""
        self.referrers: dict[Reference, None] = {}
        """Who refers to it, in the order in which they came."""
        self.planner: Reference | None = planner
        """Who encodes it in this step; None once it is encoded."""
        self.is_adopted = False
        """Whether the planner is not the one that the engine was told."""

    def __repr__(self) -> str:
        state = "planned" if self.planner else "held" if self.referrers else "reclaimable"
        return f"Entry({self.key!r}, {self.size} embeddings, {state})"


class Eviction(Protocol):
    """The order in which reclaimable entries are given up."""

    def show(self, entry: Entry) -> None:
        """A request begins to refer to the entry: it is no candidate now, whether it was one or not."""

    def admit(self, entry: Entry) -> bool:
        """Nobody refers to the entry any more. True keeps it, as a candidate; False gives it up at once."""

    def pop(self) -> Entry:
        """Remove and return the candidate to give up next. There is one whenever this is called."""

    def clear(self) -> None:
        """Forget every candidate."""


class OldestReleased:
    """Gives up what was released first: the default, and what vLLM does."""

    def __init__(self) -> None:
        self._candidates: OrderedDict[Key, Entry] = OrderedDict()

    def show(self, entry: Entry) -> None:
        """See `Eviction`."""
        self._candidates.pop(entry.key, None)

    def admit(self, entry: Entry) -> bool:
        """See `Eviction`."""
        self._candidates[entry.key] = entry
        return True

    def pop(self) -> Entry:
        """See `Eviction`."""
        return self._candidates.popitem(last=False)[1]

    def clear(self) -> None:
        """See `Eviction`."""
        self._candidates.clear()


class CostAware:
    """Keeps what is expensive to encode per embedding and shown often (GreedyDual-Size-Frequency).

    A candidate's worth is `floor + shows * cost / size`. The floor is the worth of the last entry that was given up, so
    an entry which is not shown again is overtaken by newer ones. The shows of given-up keys are remembered for as many
    keys as there are candidates: a key that comes back soon does not begin at one show again.
    """

    def __init__(self) -> None:
        self._floor = 0.0
        self._admissions = 0
        self._candidates: dict[Key, int] = {}  # key → its admission, which tells its place in the heap from void ones
        self._heap: list[tuple[float, int, Entry]] = []
        self._past_shows: OrderedDict[Key, int] = OrderedDict()

    def show(self, entry: Entry) -> None:
        """See `Eviction`."""
        self._candidates.pop(entry.key, None)
        if not entry.shows:
            entry.shows = self._past_shows.pop(entry.key, 0)
        entry.shows += 1

    def admit(self, entry: Entry) -> bool:
        """See `Eviction`."""
        self._admissions += 1
        self._candidates[entry.key] = self._admissions
        worth = self._floor + entry.shows * entry.cost / max(entry.size, 1)
        heappush(self._heap, (worth, self._admissions, entry))
        if len(self._heap) > 2 * len(self._candidates) + 64:
            # A sorted list is a heap. At least half of the places are void: O(log n) amortised over their admissions.
            self._heap = sorted(place for place in self._heap if self._is_current(place))
        return True

    def pop(self) -> Entry:
        """See `Eviction`."""
        while not self._is_current(place := heappop(self._heap)):
            pass
        self._floor, _, entry = place
        del self._candidates[entry.key]
        self._past_shows[entry.key] = entry.shows
        while len(self._past_shows) > len(self._candidates) + 1:
            self._past_shows.popitem(last=False)
        return entry

    def clear(self) -> None:
        """See `Eviction`."""
        self._floor = 0.0
        self._candidates.clear()
        self._heap.clear()
        self._past_shows.clear()

    def _is_current(self, place: tuple[float, int, Entry]) -> bool:
        return self._candidates.get(place[2].key) == place[1]


class Immediate:
    """Keeps nothing that nobody refers to: encoder-decoder models, where residency only limits the rate (B9)."""

    def show(self, entry: Entry) -> None:
        """See `Eviction`."""

    def admit(self, entry: Entry) -> bool:  # noqa: ARG002
        """See `Eviction`."""
        return False

    def pop(self) -> Entry:
        """Never called: there are no candidates."""
        raise LookupError("an immediate eviction has no candidates")

    def clear(self) -> None:
        """See `Eviction`."""
