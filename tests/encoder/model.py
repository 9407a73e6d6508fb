"""A slow model of residency and planning: every answer is recomputed from lists, by the words of the requirements.

It also plays the worker that holds the tensors, so that the machines can check what counts in the end: at execution,
every embedding that a step needs is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from semel.core import Placeholder
from semel.encoder.eviction import Key, Reference
from semel.encoder.plan import Plan, Request
from semel.encoder.residency import Settlement


@dataclass
class SlowResidency:
    """B1-B9 with oldest-released eviction, or with none kept at all."""

    capacity: int
    keeps_released: bool = True
    sizes: dict[Key, int] = field(default_factory=dict)
    references: list[tuple[Reference, Key]] = field(default_factory=list)
    released: list[Key] = field(default_factory=list)
    first_planners: dict[Key, Reference] = field(default_factory=dict)
    orphans: set[Key] = field(default_factory=set)
    evicted: list[Key] = field(default_factory=list)
    wrong: set[Key] = field(default_factory=set)
    begun: list[tuple[Reference, bool]] = field(default_factory=list)
    queries: int = 0
    hits: int = 0
    evictions: int = 0

    def referrers(self, key: Key) -> list[Reference]:
        return [reference for reference, held in self.references if held == key]

    @property
    def free(self) -> int:
        return self.capacity - sum(self.sizes.values())

    @property
    def reclaimable(self) -> int:
        return sum(size for key, size in self.sizes.items() if not self.referrers(key))

    def held_inputs(self, request: str) -> set[int]:
        return {index for (owner, index), _ in self.references if owner == request}

    def hold(self, request: str, index: int, key: Key, *, hit: bool = True) -> None:
        if ((request, index), key) in self.references:
            return
        self.references.append(((request, index), key))
        self.begun.append(((request, index), hit))
        self.released = [other for other in self.released if other != key]

    def allocate(self, request: str, index: int, key: Key, size: int) -> None:
        hit = key in self.sizes
        if not hit:
            while self.free < size:
                self.evict(self.released[0])
            self.sizes[key] = size
            self.first_planners[key] = (request, index)
        self.hold(request, index, key, hit=hit)

    def evict(self, key: Key) -> None:
        self.released = [other for other in self.released if other != key]
        del self.sizes[key]
        self.evicted.append(key)
        self.evictions += 1

    def release(self, request: str, index: int) -> None:
        keys = [key for reference, key in self.references if reference == (request, index)]
        self.references = [pair for pair in self.references if pair[0] != (request, index)]
        self.begun = [pair for pair in self.begun if pair[0] != (request, index)]
        for key in keys:
            if self.first_planners.get(key) == (request, index):
                self.orphans.add(key)
            if self.referrers(key):
                continue
            if key in self.first_planners:
                del self.first_planners[key], self.sizes[key]
                self.orphans.discard(key)
            else:
                self.released.append(key)
                if not self.keeps_released:
                    self.evict(key)

    def release_all(self, request: str) -> None:
        # The order of release decides the order of eviction: inputs are let go in the order they were taken.
        for reference, _ in list(self.references):
            if reference[0] == request:
                self.release(*reference)

    def discard(self, key: Key) -> None:
        for reference in self.referrers(key):
            self.release(*reference)
        if key in self.sizes:
            self.evict(key)
        self.wrong |= {key} & set(self.evicted)

    def settle(self) -> Settlement:
        taken_over = [self.referrers(key)[0] for key in self.first_planners if key in self.orphans]
        evicted = list(dict.fromkeys(key for key in self.evicted if key not in self.sizes or key in self.wrong))
        self.queries += len(self.begun)
        self.hits += sum(hit and reference not in taken_over for reference, hit in self.begun)
        self.first_planners, self.orphans, self.begun, self.evicted, self.wrong = {}, set(), [], [], set()
        return Settlement(tuple(evicted), tuple(taken_over))

    def reset(self) -> None:
        self.sizes, self.first_planners, self.orphans = {}, {}, set()
        self.references, self.released, self.begun, self.evicted, self.wrong = [], [], [], [], set()


def embeds_in(placeholder: Placeholder, start: int, end: int) -> bool:
    """Whether a position of `[start, end)` takes an embedding of the placeholder, looked up one by one."""
    return any(
        placeholder.offset <= position < placeholder.end
        and (placeholder.mask is None or placeholder.mask.bits[position - placeholder.offset])
        for position in range(start, end)
    )


@dataclass
class SlowPlanner:
    """C1-C4 by definition: of all places where the tokens may end, the last one for which everything fits."""

    residency: SlowResidency
    shift: int
    chunks_items: bool
    is_remote: Callable[[Key], bool]

    def plan(self, request: Request, computed: int, tokens: int, budget: int) -> Plan:
        if tokens == 0 or (request.timeline.is_encoder and computed > 0):
            return Plan(tokens, budget)
        starts = [p.offset - computed - self.shift for p in request.timeline]
        for candidate in sorted({tokens, *(s for s in starts if 0 < s < tokens)}, reverse=True):
            if self._splits_an_item(request, computed, candidate):
                continue
            plan = self._serve(request, computed, candidate, budget)
            if plan is not None:
                return plan
        return Plan(0, budget)

    def _needs(self, request: Request, computed: int, tokens: int) -> list[int]:
        timeline = request.timeline
        if timeline.is_encoder:
            return list(range(len(timeline)))
        end = computed + tokens + self.shift
        return [index for index, p in enumerate(timeline) if embeds_in(p, computed, end)]

    def _splits_an_item(self, request: Request, computed: int, tokens: int) -> bool:
        if self.chunks_items or request.timeline.is_encoder:
            return False
        window_end = computed + tokens + self.shift
        return any(computed < p.offset < window_end and computed + tokens < p.end for p in request.timeline)

    def _serve(self, request: Request, computed: int, tokens: int, budget: int) -> Plan | None:
        cache = self.residency
        needs = self._needs(request, computed, tokens)
        hits = [i for i in needs if request.keys[i] in cache.sizes]
        first: dict[Key, int] = {}
        for i in needs:
            if i not in hits:
                first.setdefault(request.keys[i], i)
        loads = [i for key, i in first.items() if self.is_remote(key)]
        encodes = [i for i in first.values() if i not in loads]
        repeats = [i for i in needs if i not in hits and i not in first.values()]

        def size(indices: list[int]) -> int:
            return sum(request.timeline[i].num_embeds for i in indices)

        unreferenced = {request.keys[i] for i in hits if not cache.referrers(request.keys[i])}
        space = sum(cache.sizes[key] for key in unreferenced) + size(encodes) + size(loads)
        if space > cache.free + cache.reclaimable or size(encodes) > budget:
            return None
        return Plan(tokens, budget - size(encodes), tuple(hits), tuple(encodes), tuple(loads), tuple(repeats))
