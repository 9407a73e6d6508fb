"""Turns at an engine: which request of which tenant begins next (threats S21). Pure: the clock is passed in.

An engine serves its queue in order of arrival and knows no tenants. So it gets only what keeps it busy: a window of
sequences, and of prompts that it has not computed yet. The others wait here. Each tenant has a counter of tokens, of
the prompts that began and of all that was generated. The tenant with the smallest counter is next, with its own
requests in order of priority and arrival. A tenant that comes back gets the smallest counter of those that wait: to
have been idle earns nothing, and to have been busy alone costs nothing.

While several tenants are about, the last eighth of the window is only for a tenant within its share of it: its request
does not wait until a long answer of another ends. A request of several sequences that does not fit may be passed over
by tenants that are hardly ahead in tokens; then the places that become free are left free until it fits. A tenant
without a name, alone, has no window: there are no API keys then, and the engine's own queue is as good.

A decision costs the same however many tenants wait: counters only grow, so a heap is mended where it is read. Only a
tenant that comes back may move forward, among equal counters; then it gets another entry, and the old one is void.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final

__all__ = ["EngineWindow", "Turn", "Turns"]

_ABOUT_S: Final = 600.0
"""How long after its last request a tenant may come back and find a place free."""

_UNKNOWN_STEPS: Final = 2
"""Steps that an engine has begun before the output of a step is seen: it plans a step while another one runs."""

_AT_HAND: Final = 2
"""Requests of a tenant that may be ahead of the engine whatever their length: one is computed, one is next."""


@dataclass(frozen=True, slots=True)
class EngineWindow:
    """What an engine takes at a time, as it is configured."""

    sequences: int
    """That it runs at a time."""

    step_tokens: int
    """That it computes in one step."""

    max_sequences: int | None = None
    """Waiting and running, over which requests are refused."""

    max_prompt_tokens: int | None = None
    """Of requests that have not begun, over which requests are refused."""

    @property
    def lead(self) -> int:
        """Sequences that it gets beyond those that it runs, so that the next one is there when one ends."""
        return max(1, self.sequences // 16)

    @property
    def common_places(self) -> int:
        """Sequences that a tenant may have beyond its share while others are about."""
        reserve = max(1, self.sequences // 8) if self.sequences > 3 else 0
        return self.sequences - reserve

    @property
    def lead_tokens(self) -> int:
        """That a tenant may have had more than another whose request it passes over: of eight steps."""
        return 8 * self.sequences

    @property
    def prompt_tokens(self) -> int:
        """Of prompts that it gets ahead of its need: half of them are computed before that is known here."""
        return 2 * _UNKNOWN_STEPS * self.step_tokens

    def ends(self, max_tokens: int | None) -> int:
        """How many of sequences so short have ended before that is known here; for long ones none."""
        return 0 if max_tokens is None else min(_UNKNOWN_STEPS * self.sequences // max_tokens, self.sequences // 2)


_Entry = tuple[int, int, "_Tenant"]

_VOID_ENTRIES: Final = 64
"""Entries that the heap may have beside two for each tenant, before the void ones are dropped."""


@dataclass(slots=True, eq=False)
class _Tenant:
    name: str
    counter: int = 0
    places: int = 0
    ahead: int = 0
    """Its requests that the engine has, and that have no output yet."""
    seen: float = 0.0
    queue: list[Turn] = field(default_factory=list)
    since: int = 0
    """The number of the request with which its queue began."""
    is_active: bool = False
    """Whether it has a request, as it was counted."""
    listed: _Entry | None = None
    """The entry in the heap that counts, as it was or as it is."""

    @property
    def is_idle(self) -> bool:
        return not (self.places or self.queue)

    @property
    def entry(self) -> _Entry:
        """Its place in the order; of equal counters, that of the tenant which came last: it has the least."""
        return self.counter, -self.since, self


class Turn:
    """A request that waits, or that the engine has."""

    __slots__ = (
        "_ends",
        "_is_ahead",
        "_key",
        "_tenant",
        "is_waiting",
        "places",
        "prompt_tokens",
        "sequences",
    )

    def __init__(
        self, tenant: _Tenant, sequences: int, prompt_tokens: int, places: int, ends: int, key: tuple[int, int]
    ) -> None:
        self.sequences = sequences
        """That have not ended."""
        self.places = places
        """Of the window that it takes: as many, but never more than one tenant can have."""
        self._ends = ends
        self.prompt_tokens = prompt_tokens
        self.is_waiting = True
        self._is_ahead = False
        self._tenant = tenant
        self._key = key

    def __repr__(self) -> str:
        state = "waits" if self.is_waiting else "is in the engine" if self.sequences else "is over"
        return f"Turn({self._tenant.name!r}, {self.sequences} sequences, {state})"

    def __lt__(self, other: Turn) -> bool:
        return self._key < other._key


class Turns:
    """The requests of all tenants at one engine. Without a window none waits."""

    def __init__(self, window: EngineWindow | None, now: Callable[[], float] = time.monotonic) -> None:
        self.window = window
        self.waiting = 0
        """Requests that wait."""
        self.sequences = 0
        """Sequences that wait or that the engine has."""
        self.places = 0
        """Places of the window that are in use."""
        self.prompt_tokens = 0
        """Of requests that wait, or that the engine has and that have no output yet."""
        self._ahead_tokens = 0
        self._now = now
        self._numbers = 0
        self._tenants: dict[str, _Tenant] = {}
        """Those that are about, in the order in which they were seen last."""
        self._heap: list[_Entry] = []
        """An entry of each tenant with a queue, and of some that have none any more; and void ones."""
        self._active = 0
        """Tenants that have a request here or in the engine."""
        self._last: _Tenant | None = None
        """Whose turn it was."""

    def __repr__(self) -> str:
        return f"Turns({self.places} places in use, {self.waiting} requests wait, {len(self._tenants)} tenants)"

    def join(
        self, name: str, prompt_tokens: int, *, max_tokens: int | None = None, sequences: int = 1, priority: int = 0
    ) -> Turn:
        """A request has come: it waits. The lower its priority the earlier it begins, among those of its tenant."""
        window = self.window
        tenant = self._see(name)
        self._numbers += 1
        if not tenant.queue:
            first = self._first() or self._last
            tenant.counter = max(tenant.counter, 0 if first is None else first.counter)
            tenant.since = self._numbers
        places = sequences if window is None else min(sequences, window.common_places)
        ends = 0 if window is None else window.ends(max_tokens)
        turn = Turn(tenant, sequences, prompt_tokens, places, ends, (priority, self._numbers))
        insort(tenant.queue, turn)
        self._list(tenant)
        self._count_active(tenant)
        self.waiting += 1
        self.sequences += sequences
        self.prompt_tokens += prompt_tokens
        return turn

    def begin(self) -> Turn | None:
        """The request that the engine gets now, if there is one. Call it until there is none."""
        passed: list[_Tenant] = []
        try:
            while (tenant := self._first()) is not None:
                turn = tenant.queue[0]
                if passed and self._is_ahead(tenant, passed[0]):
                    return None
                if self._fits(turn, turn.places):
                    return self._enter(turn)
                if not self._fits(turn, 1):
                    return None  # it is its turn; only a request that is too wide for what is free may be passed over
                heappop(self._heap)
                tenant.listed = None
                passed.append(tenant)
            return None
        finally:
            for tenant in passed:
                self._list(tenant)

    def generate(self, turn: Turn, tokens: int) -> bool:
        """The engine has generated tokens. Returns whether they are the request's first: another one may begin then."""
        turn._tenant.counter += tokens
        is_first = turn._is_ahead
        if is_first:
            self._arrive(turn)
        return is_first

    def end(self, turn: Turn) -> None:
        """One of a request's sequences has ended."""
        if turn.sequences:
            self._shrink(turn, turn.sequences - 1)

    def leave(self, turn: Turn) -> None:
        """A request has ended, or is given up, whether it waits or not. Leaving twice does no harm."""
        if turn.is_waiting:
            queue = turn._tenant.queue
            del queue[bisect_left(queue, turn)]
            turn.is_waiting = False
            turn.places = 0
            self.waiting -= 1
            self.prompt_tokens -= turn.prompt_tokens
            self._count_active(turn._tenant)
        elif turn._is_ahead:
            self._arrive(turn)
        self._shrink(turn, 0)

    def _enter(self, turn: Turn) -> Turn:
        tenant = self._last = turn._tenant
        tenant.queue.pop(0)
        tenant.counter += max(1, turn.prompt_tokens)
        tenant.places += turn.places
        tenant.ahead += 1
        turn.is_waiting, turn._is_ahead = False, True
        self.waiting -= 1
        self.places += turn.places
        self._ahead_tokens += turn.prompt_tokens
        return turn

    def _arrive(self, turn: Turn) -> None:
        """The engine has computed a prompt, or does not have to."""
        turn._is_ahead = False
        turn._tenant.ahead -= 1
        self._ahead_tokens -= turn.prompt_tokens
        self.prompt_tokens -= turn.prompt_tokens

    def _shrink(self, turn: Turn, sequences: int) -> None:
        self.sequences -= turn.sequences - sequences
        turn.sequences = sequences
        freed = max(0, turn.places - sequences)
        turn.places -= freed
        turn._tenant.places -= freed
        self.places -= freed
        self._count_active(turn._tenant)

    def _first(self) -> _Tenant | None:
        """The tenant whose turn it is, of those in the heap: it has a queue, and the first entry is as it should be."""
        heap = self._heap
        while heap:
            entry, tenant = heap[0], heap[0][2]
            if tenant.listed is not entry:
                heappop(heap)
            elif not tenant.queue:
                heappop(heap)
                tenant.listed = None
            elif entry[:2] != tenant.entry[:2]:
                tenant.listed = tenant.entry
                heapreplace(heap, tenant.listed)
            else:
                return tenant
        return None

    def _list(self, tenant: _Tenant) -> None:
        entry = tenant.entry
        if tenant.listed is None or entry[:2] < tenant.listed[:2]:
            tenant.listed = entry
            heappush(self._heap, entry)
            if len(self._heap) > 2 * len(self._tenants) + _VOID_ENTRIES:
                self._drop_void_entries()

    def _drop_void_entries(self) -> None:
        kept: list[_Entry] = []
        for entry in self._heap:
            tenant = entry[2]
            if tenant.listed is entry and tenant.queue:
                kept.append(entry)
            elif tenant.listed is entry:
                tenant.listed = None
        heapify(kept)
        self._heap = kept

    def _count_active(self, tenant: _Tenant) -> None:
        if tenant.is_active is tenant.is_idle:
            tenant.is_active = not tenant.is_idle
            self._active += 1 if tenant.is_active else -1

    def _fits(self, turn: Turn, places: int) -> bool:
        """Whether a request may begin, if it took so many places."""
        window, tenant = self.window, turn._tenant
        if window is None or self._tenants.keys() == {""}:
            return True
        if tenant.ahead >= _AT_HAND and self._ahead_tokens >= window.prompt_tokens:
            return False
        return self.places + places <= self._limit(window, turn, places)

    def _is_ahead(self, tenant: _Tenant, first: _Tenant) -> bool:
        """Whether a tenant has had so much more than the first that it may not pass it over."""
        return self.window is not None and tenant.counter - first.counter > self.window.lead_tokens

    def _limit(self, window: EngineWindow, turn: Turn, places: int) -> int:
        tenant, most = turn._tenant, window.sequences + max(window.lead, turn._ends)
        if len(self._tenants) == 1:
            return most
        active = max(2, self._active)  # another may come at any time
        is_within_share = (tenant.places + places - 1) * active < window.sequences  # of one place at least
        return most if is_within_share else window.common_places + turn._ends

    def _see(self, name: str) -> _Tenant:
        now = self._now()
        tenant = self._tenants.pop(name, None) or _Tenant(name)
        tenant.seen = now
        self._tenants[name] = tenant
        while (oldest := next(iter(self._tenants.values()))).seen < now - _ABOUT_S:
            del self._tenants[oldest.name]
            if not oldest.is_idle:
                oldest.seen = now
                self._tenants[oldest.name] = oldest
        return tenant
