"""Fetches that frontends share: one of them asks the origin, and the others find its response in a store.

HTTP's rules are those of a frontend's own cache (`freshness`), except that `private` responses are not shared. For a
URL that is not in the store, or stale, a frontend takes a lease and asks the origin. A frontend that finds a lease
waits until that is gone, at most as long as a lease is valid, and then uses what is new in the store, or asks the
origin itself. So a lease that its owner leaves behind delays others once. A store that is down or slow costs a fetch,
never a failed request; it is then left alone for a while, for the tenant that met it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Final, Protocol, TypeVar

from semel.fairness.circuit_breaker import CircuitBreaker, CircuitOpen
from semel.media.fetch.responses import ResponseKey, StoredResponse

__all__ = ["LEASE_S", "Download", "Pin", "ResponseStore", "SharedFetches"]

LEASE_S: Final = 2.0
"""Seconds for which a lease is valid, and the most that a fetch waits for another frontend's."""

_PATIENCE_S: Final = 2.0
"""Seconds for one operation of the store."""

_PAUSE_S: Final = 10.0
"""Seconds for which a tenant does without a store that failed."""

_POLL_S: Final = 0.02
_MAX_POLL_S: Final = 0.2

_T = TypeVar("_T")

Spend = Callable[[int], None]
Pin = Callable[[int], Callable[[], None]]
"""Keeps bytes that were spent on the account of who fetches until an operation has ended that nobody can stop."""

Download = Callable[[StoredResponse | None], Awaitable[StoredResponse]]
"""Asks the origin, with the response that it may confirm."""

_Read = Callable[[], Awaitable[StoredResponse | None]]

Reusable = Callable[[StoredResponse, bool], bool]
"""Decides whether a response may be served without asking its origin; True: its own fetch was under way meanwhile."""


class ResponseStore(Protocol):
    """Responses and leases, by tenant and URL. Any call may raise `MediaStoreUnavailable`."""

    async def read(self, key: ResponseKey, spend: Spend, pin: Pin) -> StoredResponse | None:
        """Return a response as it was written. `spend` is called with its bytes before they are read."""

    async def write(self, key: ResponseKey, response: StoredResponse, pin: Pin) -> None:
        """Store a response in place of the previous one, if there is room."""

    async def delete(self, key: ResponseKey) -> None:
        """Delete a response, if there is one."""

    async def take_lease(self, key: ResponseKey, lease_s: float) -> bool:
        """Take the lease of a URL unless somebody has it. Returns whether it was taken."""

    async def lease_left_s(self, key: ResponseKey) -> float | None:
        """Return for how many seconds the lease of a URL is valid; None if nobody has it."""

    async def end_lease(self, key: ResponseKey) -> None:
        """End the lease of a URL."""


class SharedFetches:
    """Fetches of one frontend, shared with those of the other frontends that have the same store."""

    def __init__(self, store: ResponseStore, is_reusable: Reusable) -> None:
        self._store = store
        self._is_reusable = is_reusable
        self._breaker = CircuitBreaker(_PATIENCE_S, _PAUSE_S)
        self.hits = 0
        """Fetches that were answered from the store."""
        self.failures = 0
        """Fetches that did without the store, since it was down or slow."""

    async def fetch(
        self, key: ResponseKey, cached: StoredResponse | None, spend: Spend, pin: Pin, download: Download
    ) -> StoredResponse:
        """Return the response of the store, or of the origin. `cached` is what this frontend has, which is not fresh.

        `spend` is called with the bytes of a response before they are read from the store, and `pin` while the store
        reads and writes them. Raises what `download` and `spend` do.
        """
        read = partial(self._store.read, key, spend, pin)
        async with AsyncExitStack() as lease:
            stored = cached
            try:
                # Without a lifetime each use is confirmed by the origin: nothing there is newer than its answer.
                if cached is None or cached.freshness.lifetime_s:
                    found = await self._ask(key, read)
                    if found is not None and self._is_reusable(found, False):
                        return self._hit(found)
                    stored = _newer(cached, found)
                    needs_lease = stored is None or stored.freshness.lifetime_s
                    if needs_lease and (new := await self._take_turn(key, found, read, lease)) is not None:
                        return self._hit(new)
            except CircuitOpen:
                self.failures += 1
            response = await download(stored)
            with suppress(CircuitOpen):  # what was fetched is good all the same
                await self._publish(key, stored, response, pin)
            return response

    async def _take_turn(
        self, key: ResponseKey, found: StoredResponse | None, read: _Read, lease: AsyncExitStack
    ) -> StoredResponse | None:
        """Take the lease of a URL, or wait for its owner. Returns what was stored since `found`, if anything was."""
        if leads := await self._ask(key, partial(self._store.take_lease, key, LEASE_S)):
            lease.push_async_callback(self._end_lease, key)
        else:
            await self._wait(key)
        if leads and found is not None:
            return None
        # The previous owner of a lease that is free may have stored a response since the first look.
        new = await self._ask(key, read)
        if new is None or (found is not None and new.freshness == found.freshness):
            return None
        return new if self._is_reusable(new, True) else None

    async def _publish(
        self, key: ResponseKey, stored: StoredResponse | None, response: StoredResponse, pin: Pin
    ) -> None:
        """Store what the origin said, unless nothing has changed."""
        if not response.freshness.shareable:
            if stored is not None:
                await self._ask(key, partial(self._store.delete, key))
        elif stored is None or response.data is not stored.data or response.freshness.lifetime_s:
            await self._ask(key, partial(self._store.write, key, response, pin))

    async def _wait(self, key: ResponseKey) -> None:
        """Wait until a lease is gone. One that is not valid any more, or is said to be for too long, is ended.

        The clock of its owner may be ahead by as much as a lease is valid.
        """
        until_s, poll_s = time.monotonic() + LEASE_S, _POLL_S
        while (left_s := await self._ask(key, partial(self._store.lease_left_s, key))) is not None:
            if not 0 < left_s <= 2 * LEASE_S or time.monotonic() >= until_s:
                return await self._end_lease(key)
            await asyncio.sleep(min(poll_s, left_s))
            poll_s = min(1.5 * poll_s, _MAX_POLL_S)
        return None

    async def _end_lease(self, key: ResponseKey) -> None:
        with suppress(CircuitOpen):  # it ends by itself
            await self._ask(key, partial(self._store.end_lease, key))

    def _hit(self, response: StoredResponse) -> StoredResponse:
        self.hits += 1
        return response

    async def _ask(self, key: ResponseKey, operation: Callable[[], Awaitable[_T]]) -> _T:
        return await self._breaker.call(key[0].name, operation)


def _newer(one: StoredResponse | None, other: StoredResponse | None) -> StoredResponse | None:
    """Return the response that was received last."""
    responses = [response for response in (one, other) if response is not None]
    return max(responses, key=lambda response: response.freshness.received_at, default=None)
