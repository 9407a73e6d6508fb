"""Names (`uuid`) that frontends share: a frontend asks its memory first, and a store for names that it does not know.

A name never changes its content, at any frontend: what a store has bound counts, and a frontend whose tenant sent
something else refuses the name. What is remembered is confirmed by the store once a minute, so that all frontends
notice within that time what another found ambiguous, and what the store has forgotten is written again. A name that a
store that is down could not be asked for means what was sent to this frontend, until the store answers.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, Final

from semel.core import Tenant
from semel.fairness.circuit_breaker import CircuitBreaker, CircuitOpen
from semel.render.media.names import MediaNames, name_key
from semel.store.bindings import AMBIGUOUS, Binding, BucketBindings
from semel.telemetry import metrics
from semel.telemetry.meter import Sample

__all__ = ["CONFIRM_S", "SharedNames"]

CONFIRM_S: Final = 60.0
"""Seconds for which what the store has said of a name is believed."""

_TIMEOUT_S: Final = 2.0
"""Seconds for what the store has to do for one name, and the most that an answer waits for its names to be written."""

_PAUSE_S: Final = 10.0
"""Seconds for which a tenant does without a store that failed."""

_MAX_WAITING: Final = 4_096
"""Names of a tenant that may wait to be written. A request may have more, alone; those of others are left out."""


class SharedNames:
    """The names of one frontend, `memory`, and of all that have the same store."""

    def __init__(self, store: BucketBindings, memory: MediaNames, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._memory = memory
        self._clock = clock
        self._breaker = CircuitBreaker(_TIMEOUT_S, _PAUSE_S)
        self._writing: set[asyncio.Task[None]] = set()
        self._waiting: Counter[str] = Counter()
        """By tenant: the names of these."""
        self._learned = 0
        self._failures = 0

    def is_current(self, tenant: Tenant, name: str) -> bool:
        """Return whether a name needs no look at the store."""
        if not self._store.is_shared:
            return True
        return self._memory.is_confirmed(tenant, name, self._clock() - CONFIRM_S)

    async def sync(self, tenant: Tenant, name: str, ours: Binding | None) -> None:
        """Bring a name in the store and in memory to the same, which is `ours` if there was nothing else."""
        merge = partial(self._store.merge, tenant.name, name_key(tenant, name), ours)
        now_s = self._clock()
        try:
            bound = await self._breaker.call(tenant.name, merge)
        except CircuitOpen:
            self._failures += 1
            return
        if bound is None:
            return
        if bound.content != AMBIGUOUS and ours is None:
            self._learned += 1
            self._memory.add_content(tenant, bound.content, bound.modality)
            self._memory.remember_digest(tenant, bound.reference, bound.digest)
        self._memory.bind(tenant, name, bound.content)
        self._memory.confirm(tenant, name, bound.content, now_s)

    def write(
        self, tenant: Tenant, count: int, work: Callable[[], Coroutine[Any, Any, None]]
    ) -> Callable[[], Coroutine[Any, Any, None]] | None:
        """Write so many names, even if their client goes. Returns a call that waits for it, but not for long.

        If too many of the tenant's wait already, these are left out, and written when they are used next.
        """
        if (waiting := self._waiting[tenant.name]) and waiting + count > _MAX_WAITING:
            self._failures += count
            return None
        self._waiting[tenant.name] += count
        writing = asyncio.create_task(work())
        self._writing.add(writing)

        def end(_: object) -> None:
            self._writing.discard(writing)
            self._waiting[tenant.name] -= count

        writing.add_done_callback(end)

        async def wait() -> None:
            await asyncio.wait([writing], timeout=_TIMEOUT_S)

        return wait

    def samples(self) -> Iterator[Sample]:
        """Return how many names came from the store, and how many did without it."""
        yield metrics.MEDIA_NAMES_LEARNED, self._learned, ()
        yield metrics.MEDIA_NAMES_UNSHARED, self._failures, ()
