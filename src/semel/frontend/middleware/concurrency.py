"""The limit on concurrent requests, for all but the probes: their number, their duration, and draining.

Without a limit on requests in flight, one client with many streams could use up a frontend (threats S18). Without their
count, a frontend that shuts down would not know when it has answered all of them. Plain ASGI; routes do not depend on
it. A refusal here costs almost nothing: the body is discarded as it arrives (`semel.web.server`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from semel.core import RetryQueue
from semel.errors import Busy, DeadlineExceeded, NotReady, ServiceError
from semel.frontend.http.sse import DONE, EventStream, error_event
from semel.frontend.limits import ConcurrencyLimits
from semel.frontend.middleware.authentication import PROBES
from semel.telemetry.meter import Meter, Sample
from semel.telemetry.metrics import REFUSALS, REQUESTS_IN_FLIGHT
from semel.web.errors import error_response

__all__ = ["ConcurrencyLimit", "ConcurrencyLimits", "RequestLimiter"]


class RequestLimiter:
    """Counts the requests in flight, and admits or refuses new ones."""

    def __init__(self, limits: ConcurrencyLimits | None = None) -> None:
        self.limits = limits or ConcurrencyLimits()
        self._inside: Counter[str] = Counter()
        self._total = 0
        self._closed = ""
        self._retries = RetryQueue()
        self._tenant_retries: dict[str, RetryQueue] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def requests(self) -> int:
        """The number of requests in flight."""
        return self._total

    @property
    def closed(self) -> str:
        """Why all new requests are refused; empty while they are admitted."""
        return self._closed

    def close(self, reason: str) -> None:
        """Refuse all new requests from now on, for this reason. Requests in flight continue."""
        self._closed = reason

    async def until_empty(self, within_s: float) -> bool:
        """Wait for at most `within_s` until no request is in flight. Returns whether that is so."""
        try:
            async with asyncio.timeout(within_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def enter(self, tenant: str) -> None:
        """Admit one request of a tenant, or refuse it."""
        limits = self.limits
        if self._closed:
            raise NotReady(f"{self._closed}; send it again, to another frontend if there is one")
        if self._total >= limits.max_requests:
            raise Busy(
                f"{limits.max_requests:,} requests are in flight already: try again in a moment, or raise it with "
                "--max-requests",
                retry_after_s=self._retries.after_s(tenant),
            )
        if limits.max_tenant_requests and self._inside[tenant] >= limits.max_tenant_requests:
            raise Busy(
                f"{limits.max_tenant_requests:,} requests of this API key's tenant are in flight already: try again "
                "when one has ended, or raise it with --max-tenant-requests",
                retry_after_s=self._retries_of(tenant).after_s(tenant),
            )
        self._inside[tenant] += 1
        self._total += 1
        self._empty.clear()

    def leave(self, tenant: str) -> None:
        """Record that one request of a tenant has ended."""
        self._retries.free()
        if self.limits.max_tenant_requests:
            self._retries_of(tenant).free()
        self._inside[tenant] -= 1
        if not self._inside[tenant]:
            del self._inside[tenant]
        self._total -= 1
        if not self._total:
            self._empty.set()

    def _retries_of(self, tenant: str) -> RetryQueue:
        """Of a tenant's own places; there are as many tenants as the operator has named."""
        return self._tenant_retries.setdefault(tenant, RetryQueue())

    def samples(self) -> Iterator[Sample]:
        """The metrics."""
        yield REQUESTS_IN_FLIGHT, self._total, ()


class ConcurrencyLimit:
    """Admits as many requests as the limiter allows, and ends those that take too long."""

    def __init__(self, app: ASGIApp, limiter: RequestLimiter, meter: Meter, wait_s: Callable[[str], float]) -> None:
        self._app = app
        self._limiter = limiter
        self._meter = meter
        self._wait_s = wait_s
        """Returns how long the next refusal of a tenant has to wait (`refusal_rate`)."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit one request, or refuse it."""
        if scope["type"] != "http" or scope["path"] in PROBES:
            await self._app(scope, receive, send)
            return
        tenant = scope.get("state", {}).get("tenant", "")
        try:
            self._limiter.enter(tenant)
        except ServiceError as error:
            await self._refuse(error, tenant, scope, receive, send)
            return
        try:
            if self._limiter.limits.max_request_s:
                await self._in_time(scope, receive, send)
            else:
                await self._app(scope, receive, send)
        finally:
            self._limiter.leave(tenant)

    async def _refuse(self, error: ServiceError, tenant: str, scope: Scope, receive: Receive, send: Send) -> None:
        self._meter.count(REFUSALS, error.code)
        answer = error_response(error)
        if self._limiter.closed:
            answer.headers["Connection"] = "close"  # the client's next request should go to another frontend
        else:
            await asyncio.sleep(self._wait_s(tenant))
        await answer(scope, receive, send)

    async def _in_time(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = _Answer(send)
        limit_s = self._limiter.limits.max_request_s
        try:
            async with asyncio.timeout(limit_s) as timeout:
                await self._app(scope, receive, answer.send)
        except TimeoutError:
            if not timeout.expired():
                raise
            if answer.is_complete:
                return
            error = DeadlineExceeded(f"the request took longer than {limit_s:g} s; raise it with --request-timeout-s")
            self._meter.count(REFUSALS, error.code)
            if not answer.begun:
                await error_response(error)(scope, receive, send)
            elif answer.is_events:
                await send({"type": "http.response.body", "body": error_event(error) + DONE, "more_body": False})
            else:
                raise error from None  # a truncated response has no valid form: close the connection


class _Answer:
    """The state of a response that is being sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = self.is_events = self.is_complete = False

    async def send(self, message: MutableMapping[str, Any]) -> None:
        await self._send(message)  # a cancellation can only come before this sends anything
        if not self.begun:
            self.begun = True
            kinds = [value for name, value in message.get("headers", ()) if name == b"content-type"]
            self.is_events = any(kind.startswith(EventStream.media_type.encode()) for kind in kinds)
        elif not message.get("more_body"):
            self.is_complete = True
