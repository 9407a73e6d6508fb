"""The cost of each eviction policy on a fixed trace, and a lower bound for every policy.

The trace is a series of shows of single items, by Zipf's law. A miss costs what encoding the item costs.

The bound is a fractional knapsack over space and time. Between two shows of an item a policy either caches it, which
takes its size for every show in between, or pays its cost again. At every time, its room is at most the capacity minus
the item that is being shown. So no policy can save more than one that may spend the sum of all that room freely,
fractions included, on the intervals with the largest saving per room.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from semel.encoder.eviction import Eviction
from semel.encoder.residency import Residency

__all__ = ["Trace", "bound", "encode_cost"]

_ITEMS = 2_000
_SKEW = 0.9
_SIZES = (64, 4_096)
_COST_SPREAD = 4.0
_CACHED_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Trace:
    """Items with sizes in embeddings and encoding costs, and the order in which they are shown."""

    sizes: list[int]
    costs: list[float]
    shows: list[int]

    @classmethod
    def draw(cls, seed: int, shows: int) -> Trace:
        """The fixed trace of a seed: sizes and costs per embedding are log-uniform, popularity follows Zipf's law."""
        rng = random.Random(seed)
        weights = [1 / (rank + 1) ** _SKEW for rank in range(_ITEMS)]
        low, high = map(math.log, _SIZES)
        sizes = [round(math.exp(rng.uniform(low, high))) for _ in range(_ITEMS)]
        costs = [size * math.exp(rng.uniform(0, math.log(_COST_SPREAD))) for size in sizes]
        return cls(sizes, costs, rng.choices(range(_ITEMS), weights, k=shows))

    @property
    def capacity(self) -> int:
        """A tenth of the working set, in embeddings."""
        return int(_CACHED_SHARE * sum(self.sizes))


def encode_cost(trace: Trace, eviction: Eviction) -> float:
    """Return the cost of the whole trace under a policy."""
    residency = Residency(trace.capacity, eviction)
    total = 0.0
    for item in trace.shows:
        if residency.size(item) is None:
            total += trace.costs[item]
            residency.allocate("", 0, item, trace.sizes[item], cost=trace.costs[item])
        else:
            residency.hold("", 0, item)
        residency.settle()
        residency.release("", 0)
    return total


def bound(trace: Trace) -> float:
    """Return a lower bound of the cost for every policy, even one that knows the future."""
    last_use: dict[int, int] = {}
    total, room, intervals = 0.0, 0.0, []
    for now, item in enumerate(trace.shows):
        total += trace.costs[item]
        room += trace.capacity - trace.sizes[item]
        if item in last_use:
            intervals.append((trace.costs[item], trace.sizes[item] * (now - last_use[item] - 1)))
        last_use[item] = now
    intervals.sort(key=lambda interval: interval[0] / max(interval[1], 1), reverse=True)
    for cost, space in intervals:
        if space > room:
            return total - cost * room / space
        total -= cost
        room -= space
    return total
