"""Planner of the encoder inputs of one request in one step (requirements C1-C4).

A plan is a value: planning changes nothing, and a plan that is not committed has no effect. Planning processes inputs
in prompt order. An input that does not fit limits the request's tokens to those before it; that input and later ones
wait. Space is accounted as it will be used: a hit on a reclaimable entry reduces the room for later inputs, and must
not use room already promised to earlier ones.

A step with k inputs in its window costs O(log n + k) for a prompt of n inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from semel.core import Placeholder, Timeline
from semel.encoder.residency import Key, Residency

__all__ = ["Plan", "Planner", "Request"]


@dataclass(frozen=True, slots=True)
class Request:
    """The part of a request that planning reads."""

    id: str
    timeline: Timeline
    keys: Sequence[Key]
    """The key of the encoder output for each placeholder of the timeline."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One request's use of the encoder in one step."""

    tokens: int
    """New tokens to compute: the requested number, or fewer if an input does not fit."""
    budget: int
    """The remaining compute budget, in embeddings."""
    hits: tuple[int, ...] = ()
    """Inputs whose encoder output is resident, or planned by another request."""
    encodes: tuple[int, ...] = ()
    loads: tuple[int, ...] = ()
    """Inputs to load from a remote encoder cache: they need space, but no compute budget (C3)."""
    repeats: tuple[int, ...] = ()
    """Inputs that repeat the item of an encode or a load of this plan (C3)."""
    cut: int | None = None
    """The input that does not fit into space or budget."""
    conflict: int | None = None
    """An input whose key has an entry with a different number of embeddings. Nothing is planned; the request is
    invalid."""


@dataclass(slots=True)
class _Draft:
    """A plan under construction."""

    room: int
    budget: int
    sizes: dict[Key, int] = field(default_factory=dict)
    hits: list[int] = field(default_factory=list)
    encodes: list[int] = field(default_factory=list)
    loads: list[int] = field(default_factory=list)
    repeats: list[int] = field(default_factory=list)

    def finish(self, tokens: int, *, cut: int | None = None) -> Plan:
        lists = (tuple(self.hits), tuple(self.encodes), tuple(self.loads), tuple(self.repeats))
        return Plan(tokens, self.budget, *lists, cut=cut)


@dataclass(frozen=True, slots=True)
class Planner:
    """A planner against one residency with the rules of one engine."""

    residency: Residency
    shift: int = 0
    """Look-ahead in tokens, for speculative decoding."""
    chunks_items: bool = True
    """True if several steps may share the tokens of one item."""
    is_remote: Callable[[Key], bool] | None = None
    """Tells whether a remote encoder cache has an item."""

    def plan(self, request: Request, *, computed: int, tokens: int, budget: int) -> Plan:
        """Plan up to `tokens` tokens after the `computed` ones, and encode up to `budget` embeddings."""
        timeline = request.timeline
        if tokens == 0 or (timeline.is_encoder and computed > 0):
            return Plan(tokens, budget)
        end = computed + tokens + self.shift
        lo, hi = timeline.window(computed, end)
        draft = _Draft(self.residency.free + self.residency.reclaimable, budget)
        for index, placeholder in enumerate(timeline[lo:hi], lo):
            if not self.chunks_items and _covers_part(placeholder, computed, tokens):
                return self._plan_before(index, None, request, draft, computed, budget)
            if placeholder.mask is not None and not (timeline.is_encoder or _has_embeds(placeholder, computed, end)):
                continue
            key, size = request.keys[index], placeholder.num_embeds
            known = draft.sizes.get(key) or self.residency.size(key)
            if known is not None and known != size:
                return Plan(0, budget, conflict=index)
            take = self._take_new if known is None else self._take_known
            if not take(index, key, size, draft):
                return self._plan_before(index, index, request, draft, computed, budget)
        return draft.finish(tokens)

    def commit(self, request: Request, plan: Plan) -> None:
        """Hold and allocate a plan's entries. The residency must not have changed since planning."""
        # Hits first: allocating for the rest must not evict them.
        for index in plan.hits:
            self.residency.hold(request.id, index, request.keys[index])
        for index in (*plan.encodes, *plan.loads):
            size = request.timeline[index].num_embeds
            self.residency.allocate(request.id, index, request.keys[index], size)
        for index in plan.repeats:
            self.residency.hold(request.id, index, request.keys[index])

    def _plan_before(
        self, index: int, cut: int | None, request: Request, draft: _Draft, computed: int, budget: int
    ) -> Plan:
        """Return the plan that ends, shift included, before an input that cannot be part of it (C2)."""
        timeline = request.timeline
        tokens = timeline[index].offset - computed - self.shift
        if self.chunks_items:
            return draft.finish(tokens, cut=cut) if tokens > 0 else Plan(0, budget, cut=cut)
        # The shorter window may cover only part of the previous item, which must then be left out too.
        while tokens > 0 and index > 0 and _covers_part(timeline[index - 1], computed, tokens):
            index -= 1
            tokens = timeline[index].offset - computed - self.shift
        if tokens <= 0:
            return Plan(0, budget, cut=cut)
        return replace(self.plan(request, computed=computed, tokens=tokens, budget=budget), cut=cut)

    def _take_known(self, index: int, key: Key, size: int, draft: _Draft) -> bool:
        """Add an input whose encoder output is resident or in the draft; False without room for it."""
        if self.residency.size(key) is None:
            draft.repeats.append(index)
            return True
        space = 0 if key in draft.sizes else self.residency.claim(key)
        if space > draft.room:
            return False
        draft.room -= space
        draft.sizes[key] = size
        draft.hits.append(index)
        return True

    def _take_new(self, index: int, key: Key, size: int, draft: _Draft) -> bool:
        """Add an input to encode or load; False without enough space or budget."""
        is_remote = self.is_remote is not None and self.is_remote(key)
        effort = 0 if is_remote else size
        if size > draft.room or effort > draft.budget:
            return False
        draft.room -= size
        draft.budget -= effort
        draft.sizes[key] = size
        (draft.loads if is_remote else draft.encodes).append(index)
        return True


def _covers_part(placeholder: Placeholder, computed: int, tokens: int) -> bool:
    """Return whether the tokens would cover an item's start but not its end."""
    return computed < placeholder.offset and computed + tokens < placeholder.end


def _has_embeds(placeholder: Placeholder, start: int, end: int) -> bool:
    """Return whether an embedding falls on prompt positions `[start, end)` (C4)."""
    offset = placeholder.offset
    first, last = placeholder.embed_range(max(0, start - offset), min(placeholder.length, end - offset))
    return first < last
