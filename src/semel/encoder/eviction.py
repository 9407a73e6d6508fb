"""Eviction policies of `Residency`, and the entries that they choose from.

A policy contains only its candidates: entries without a referrer. Residency calls it to make room.
`OldestReleased` and `Immediate` take O(1) per call, `CostAware` O(log n) amortised.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from heapq import heappop, heappush
from typing import Protocol

__all__ = ["CostAware", "Entry", "Eviction", "Immediate", "Key", "OldestReleased", "Reference"]

Key = Hashable
"""The key of an encoder output; semel uses digests."""

Reference = tuple[str, int]
"""One input of one request: `(request, index)`."""


class Entry:
    """One encoder output that is resident, or planned for the end of the step."""

    __slots__ = ("cost", "is_adopted", "key", "planner", "referrers", "shows", "size")

    def __init__(self, key: Key, size: int, cost: float, planner: Reference | None = None) -> None:
        self.key = key
        self.size = size
        """In embeddings; of a slot in a host cache in blocks."""
        self.cost = cost
        """Cost of encoding it again, in any unit common to all entries."""
        self.shows = 0
        """Number of times that requests began to refer to it, for policies that count this."""
        self.referrers: dict[Reference, None] = {}
        """The inputs that refer to it, oldest first."""
        self.planner = planner
        """The input that encodes it in this step; None once it is encoded."""
        self.is_adopted = False
        """True if the encode was taken over: the planner is not the input that the engine expects."""

    def __repr__(self) -> str:
        state = "planned" if self.planner else "held" if self.referrers else "reclaimable"
        return f"Entry({self.key!r}, {self.size} embeddings, {state})"


class Eviction(Protocol):
    """The order in which reclaimable entries are evicted."""

    def show(self, entry: Entry) -> None:
        """Take note that a request refers to the entry. It is not a candidate now, whether or not it was one before."""

    def admit(self, entry: Entry) -> bool:
        """Return the entry's last reference ended. True makes it a candidate; False evicts it at once."""

    def pop(self) -> Entry:
        """Remove and return the candidate to evict next. Called only if there is one."""

    def discard(self, entry: Entry) -> None:
        """Forget an entry that is gone, whether or not it was a candidate."""

    def clear(self) -> None:
        """Remove every candidate."""


class OldestReleased:
    """Eviction of the entry that was released first. The default, and vLLM's policy."""

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

    def discard(self, entry: Entry) -> None:
        """See `Eviction`."""
        self._candidates.pop(entry.key, None)

    def clear(self) -> None:
        """See `Eviction`."""
        self._candidates.clear()


class CostAware:
    """GreedyDual-Size-Frequency: entries stay that are expensive per embedding and often used.

    A candidate's worth is `floor + shows * cost / size`. The floor is the worth of the last evicted entry, so newer
    entries overtake an entry that is not used again. The policy remembers the shows of evicted keys, for as many keys
    as there are candidates: a key that soon returns does not start again at one show.
    """

    def __init__(self) -> None:
        self._floor = 0.0
        self._admissions = 0
        self._candidates: dict[Key, int] = {}  # key → its admission; other places of the key in the heap are void
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

    def discard(self, entry: Entry) -> None:
        """See `Eviction`."""
        self._candidates.pop(entry.key, None)

    def clear(self) -> None:
        """See `Eviction`."""
        self._floor = 0.0
        self._candidates.clear()
        self._heap.clear()
        self._past_shows.clear()

    def _is_current(self, place: tuple[float, int, Entry]) -> bool:
        return self._candidates.get(place[2].key) == place[1]


class Immediate:
    """Eviction with the last reference: encoder-decoder models, where residency only limits the rate (B9)."""

    def show(self, entry: Entry) -> None:
        """See `Eviction`."""

    def admit(self, entry: Entry) -> bool:  # noqa: ARG002
        """See `Eviction`."""
        return False

    def pop(self) -> Entry:
        """Raise an error: there are no candidates."""
        raise LookupError("an immediate eviction has no candidates")

    def discard(self, entry: Entry) -> None:
        """See `Eviction`."""

    def clear(self) -> None:
        """See `Eviction`."""
