"""A circuit breaker for a shared store: a tenant that met it down or slow does without it for a while.

Each tenant has a state of its own, so none notices what another does to the store.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from semel.errors import MediaStoreUnavailable

__all__ = ["CircuitBreaker", "CircuitOpen"]

_T = TypeVar("_T")


class CircuitOpen(Exception):
    """The store did not answer, or has not lately."""


class CircuitBreaker:
    """Operations of a store, by tenant's name."""

    def __init__(self, timeout_s: float, pause_s: float) -> None:
        self._timeout_s = timeout_s
        self._pause_s = pause_s
        self._open_until_s: dict[str, float] = {}

    async def call(self, tenant: str, operation: Callable[[], Awaitable[_T]]) -> _T:
        """Return what an operation of the store does, in time; raises `CircuitOpen` otherwise."""
        if time.monotonic() < self._open_until_s.get(tenant, 0.0):
            raise CircuitOpen
        try:
            async with asyncio.timeout(self._timeout_s):
                return await operation()
        except (MediaStoreUnavailable, TimeoutError):
            self._open_until_s[tenant] = time.monotonic() + self._pause_s
            raise CircuitOpen from None
