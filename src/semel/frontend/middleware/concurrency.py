"""The limit on concurrent requests, for all but the probes: their number, their duration, and draining.

Without a limit on requests in flight, one client with many streams could use up a frontend (threats S18). Without their
count, a frontend that shuts down would not know when it has answered all of them. Plain ASGI; routes do not depend on
it. A refusal here costs almost nothing: the body is discarded as it arrives (`semel.web.server`).

Tenants share the places (threats S21). If there is none for a tenant within its share, the newest request of a tenant
that has more is called back, provided that its response has not begun. If all have begun, the tenant is refused, and
the next place is kept for it until it was to come again: whoever has more than a share gets no more meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from functools import partial
from typing import Any, Final

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from semel.errors import Busy, DeadlineExceeded, NotReady, ServiceError
from semel.fairness.retry import RetryQueue
from semel.fairness.shares import Claims
from semel.frontend.http.body import CLIENT_CLOSED
from semel.frontend.http.errors import refusal
from semel.frontend.http.sse import EventStream, stream_ending
from semel.frontend.limits import ConcurrencyLimits
from semel.frontend.middleware.authentication import PROBES, tenant_name
from semel.frontend.middleware.refusal_rate import AbortThrottle
from semel.telemetry import metrics
from semel.telemetry.meter import Meter, Sample
from semel.web.disconnect import on_disconnect
from semel.web.revocation import Revocation

__all__ = ["CUT_OFF", "REFUSED", "ConcurrencyLimit", "ConcurrencyLimits", "Place", "RequestLimiter"]

CUT_OFF: Final = "semel.cut_off"
"""The key under which the scope of a request has the error that cut its response off."""

REFUSED: Final = "semel.refused"
"""The key that the scope of a request has once it is refused: a client that leaves then has aborted nothing."""

_MAX_SCATTER: Final = 2.0
"""A client comes again after at most so many times what it was told (`semel.web.errors`)."""

_MAX_EARLY_BYTES: Final = 16 << 10
"""The most bytes of a body that are read before its request is admitted."""


class Place:
    """The place of one request in flight."""

    __slots__ = ("error", "is_free", "is_revocable", "scope", "tenant")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.is_free = False
        """True once it was called back, or the request has ended."""

        self.scope: Revocation | None = None
        """The scope in which it can be cut off, and called back until its response begins."""

        self.is_revocable = False
        self.error: Busy | None = None
        """Why it was called back, if it was."""


class RequestLimiter:
    """Counts the requests in flight, and admits or refuses new ones."""

    def __init__(self, limits: ConcurrencyLimits | None = None, *, now: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits or ConcurrencyLimits()
        self._now = now
        self._claims: Claims[Place] = Claims(self._limits.max_requests)
        self._wanted: dict[str, tuple[int, float]] = {}
        """By tenant within its share: requests that were refused because all places had begun, and how long to wait
        for them."""

        self._places: set[Place] = set()
        self._called_back: Counter[str] = Counter()
        self._total = 0
        self._closed = ""
        self._retries = RetryQueue()
        self._tenant_retries: dict[str, RetryQueue] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def limits(self) -> ConcurrencyLimits:
        """The limits that it enforces."""
        return self._limits

    @limits.setter
    def limits(self, limits: ConcurrencyLimits) -> None:
        self._limits = limits
        self._claims.shares.capacity = limits.max_requests

    @property
    def requests(self) -> int:
        """The number of requests in flight."""
        return self._total

    @property
    def called_back(self) -> Mapping[str, int]:
        """The number of requests that were called back, by tenant."""
        return self._called_back

    @property
    def closed(self) -> str:
        """Why all new requests are refused; empty while they are admitted."""
        return self._closed

    def close(self, reason: str) -> None:
        """Refuse all new requests from now on, for this reason. Requests in flight continue."""
        self._closed = reason

    def cut_off(self, error: NotReady) -> None:
        """End every request in flight with this error: as its response, or as the last event of its stream."""
        for place in self._places:
            if place.scope is not None:
                place.scope.revoke(error)

    async def until_empty(self, within_s: float) -> bool:
        """Wait for at most `within_s` until no request is in flight. Returns whether that is so."""
        try:
            async with asyncio.timeout(within_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def enter(self, tenant: str) -> Place:
        """Admit one request of a tenant, or refuse it."""
        limits, shares = self._limits, self._claims.shares
        if self._closed:
            raise NotReady(f"{self._closed}; send it again, to another frontend if there is one")
        revoked = self._claims.to_revoke(tenant, 1)
        if revoked is None:
            retry_after_s = self._retries.after_s(tenant)
            self._want(tenant, retry_after_s)
            raise Busy(
                f"{limits.max_requests:,} requests are in flight already: try again in a moment, or raise it with "
                "--max-requests",
                retry_after_s=retry_after_s,
            )
        if not self._may_enter(tenant):
            raise Busy(
                f"another tenant waits for a place: while others ask, each has an equal share of the "
                f"{limits.max_requests:,} requests in flight; try again in a moment, or raise it with --max-requests",
                retry_after_s=self._retries.after_s(tenant),
            )
        if limits.max_tenant_requests and shares[tenant] >= limits.max_tenant_requests:
            raise Busy(
                f"{limits.max_tenant_requests:,} requests of this API key's tenant are in flight already: try again "
                "when one has ended, or raise it with --max-tenant-requests",
                retry_after_s=self._retries_of(tenant).after_s(tenant),
            )
        for place in revoked:
            self._call_back(place)
        shares.change(tenant, 1)
        if tenant in self._wanted:
            count, until = self._wanted.pop(tenant)
            if count > 1:
                self._wanted[tenant] = count - 1, until
        self._total += 1
        self._empty.clear()
        self._places.add(place := Place(tenant))
        return place

    def offer(self, place: Place, scope: Revocation) -> None:
        """Let a request be cut off in this scope, and be called back until its response begins."""
        place.scope = scope
        place.is_revocable = True
        self._claims.offer(place.tenant, place, 1)

    def commit(self, place: Place) -> None:
        """The response of a request begins: it is not called back any more."""
        place.is_revocable = False
        self._claims.offer(place.tenant, place, 0)
        if place.error is not None and place.scope is not None:
            place.scope.withdraw(place.error)

    def leave(self, place: Place) -> None:
        """Record that a request has ended."""
        self._free(place)
        self._places.discard(place)
        self._total -= 1
        if not self._total:
            self._empty.set()

    def _free(self, place: Place) -> None:
        """Its place is free from now on, once."""
        if place.is_free:
            return
        place.is_free = True
        if place.is_revocable:
            self.commit(place)
        self._claims.shares.change(place.tenant, -1)
        self._retries.free()
        if self._limits.max_tenant_requests:
            self._retries_of(place.tenant).free()

    def _call_back(self, place: Place) -> None:
        assert place.scope is not None
        self._free(place)
        self._called_back[place.tenant] += 1
        place.error = Busy(
            f"the request was called back: while other tenants ask, each has an equal share of the "
            f"{self.limits.max_requests:,} requests in flight; try again in a moment, or raise it with --max-requests",
            retry_after_s=self._retries.after_s(place.tenant),
        )
        place.scope.revoke(place.error)

    def _may_enter(self, tenant: str) -> bool:
        """Return whether no tenant within its share has a better claim to the place."""
        if not self._wanted:
            return True
        now, shares = self._now(), self._claims.shares
        for other in [other for other, (_, until) in self._wanted.items() if until < now]:
            del self._wanted[other]
        wanted = sum(count for other, (count, _) in self._wanted.items() if other != tenant)
        return shares.fits(1 + wanted) or shares[tenant] < self._share(tenant)

    def _want(self, tenant: str, retry_after_s: float) -> None:
        """Keep a place for a request that was refused, if its tenant is within its share."""
        count, _ = self._wanted.get(tenant, (0, 0.0))
        if self._claims.shares[tenant] + count < self._share(tenant):
            self._wanted[tenant] = count + 1, self._now() + _MAX_SCATTER * retry_after_s

    def _share(self, tenant: str) -> int:
        """Return the equal share of a tenant, among all that have places or want some."""
        return self.limits.max_requests // len({tenant, *self._claims.shares, *self._wanted})

    def _retries_of(self, tenant: str) -> RetryQueue:
        """Of a tenant's own places; there are as many tenants as the operator has named."""
        return self._tenant_retries.setdefault(tenant, RetryQueue())

    def samples(self) -> Iterator[Sample]:
        """The metrics."""
        yield metrics.REQUESTS_IN_FLIGHT, self._total, ()


class ConcurrencyLimit:
    """Admits as many requests as the limiter allows, and ends those that take too long."""

    def __init__(
        self, app: ASGIApp, limiter: RequestLimiter, meter: Meter, wait_s: Callable[[str], float], aborts: AbortThrottle
    ) -> None:
        self._app = app
        self._aborts = aborts
        self._limiter = limiter
        self._meter = meter
        self._wait_s = wait_s
        """Returns how long the next refusal of a tenant has to wait (`refusal_rate`)."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit one request, or refuse it."""
        if scope["type"] != "http" or scope["path"] in PROBES:
            await self._app(scope, receive, send)
            return
        tenant = tenant_name(scope)
        client = _Client(scope, receive)
        on_disconnect(scope, client.leave)
        if (wait_s := self._aborts.wait_s(tenant)) and not await client.stays(wait_s):
            self._aborts.end(tenant, 0.0)
            await Response(status_code=CLIENT_CLOSED)(scope, receive, send)
            return
        try:
            place = self._limiter.enter(tenant)
        except ServiceError as error:
            await self._refuse(error, tenant, scope, client.receive, send)
            return
        revocation = Revocation()
        answer = _Answer(client, send, partial(self._limiter.commit, place))
        began_s = self._aborts.now()
        try:
            with revocation:
                self._limiter.offer(place, revocation)
                await self._serve(scope, client.receive, answer)
        except ServiceError as error:
            # Its place was called back, or the account of a stream just before that began.
            if error is place.error or (isinstance(error, Busy) and not answer.has_begun):
                await self._refuse(error, tenant, scope, receive, send)
            elif error is revocation.error:
                await self._cut_off(error, answer, scope, receive)
            else:
                raise
        finally:
            self._limiter.leave(place)
            if client.has_left:
                self._aborts.end(tenant, self._aborts.now() - began_s)

    def _serve(self, scope: Scope, receive: Receive, answer: _Answer) -> Awaitable[None]:
        """Pass a request on. No coroutine without a deadline: each token would resume it."""
        if limit_s := self._limiter.limits.max_request_s:
            return self._serve_within(limit_s, scope, receive, answer)
        return self._app(scope, receive, answer.send)

    async def _serve_within(self, limit_s: float, scope: Scope, receive: Receive, answer: _Answer) -> None:
        try:
            async with asyncio.timeout(limit_s) as timeout:
                await self._app(scope, receive, answer.send)
        except TimeoutError:
            if not timeout.expired():
                raise
            error = DeadlineExceeded(f"the request took longer than {limit_s:g} s; raise it with --request-timeout-s")
            await self._cut_off(error, answer, scope, receive)

    async def _cut_off(self, error: ServiceError, answer: _Answer, scope: Scope, receive: Receive) -> None:
        """End a request with an error, wherever it is."""
        if answer.is_complete:
            return
        self._meter.count(metrics.REFUSALS, error.code)
        if not answer.has_begun:
            await refusal(error, scope)(scope, receive, answer.send)
            return
        scope[CUT_OFF] = error
        if not answer.is_events:
            raise error from None  # a truncated response has no valid form: close the connection
        await answer.send({"type": "http.response.body", "body": stream_ending(scope, error), "more_body": False})

    async def _refuse(self, error: ServiceError, tenant: str, scope: Scope, receive: Receive, send: Send) -> None:
        self._meter.count(metrics.REFUSALS, error.code)
        scope[REFUSED] = True
        answer = refusal(error, scope)
        if self._limiter.closed:
            answer.headers["Connection"] = "close"  # the client's next request should go to another frontend
        else:
            await asyncio.sleep(self._wait_s(tenant))
        await answer(scope, receive, send)


class _Client:
    """The client of one request, while it is answered."""

    __slots__ = ("_early", "_receive", "_scope", "has_left", "is_answered")

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._scope = scope
        self._receive = receive
        self._early: dict[str, Any] | None = None
        self.is_answered = False
        self.has_left = False
        """True if it disconnected before its answer was complete, and before it was refused."""

    async def stays(self, wait_s: float) -> bool:
        """Wait so long; False as soon as the client disconnects, if its body is a small one."""
        body = bytearray()
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while len(body) <= _MAX_EARLY_BYTES:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        return False
                    body += message.get("body", b"")  # not a list of pieces: a client decides how small they are
                    self._early = {**message, "body": body}
                await asyncio.sleep(wait_s)  # the rest is read when it is admitted
        return True

    async def receive(self) -> MutableMapping[str, Any]:
        if self._early is not None:
            early, self._early = self._early, None
            return early | {"body": bytes(early["body"])}
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.leave()
        return message

    def leave(self) -> None:
        self.has_left |= not self.is_answered and REFUSED not in self._scope


class _Answer:
    """A response that is being sent. Most of its messages are events, one for each token: they cost no coroutine."""

    __slots__ = ("_client", "_on_begin", "_send", "has_begun", "is_complete", "is_events")

    def __init__(self, client: _Client, send: Send, on_begin: Callable[[], None]) -> None:
        self._client = client
        self._send = send
        self._on_begin = on_begin
        self.has_begun = self.is_events = self.is_complete = False

    def send(self, message: MutableMapping[str, Any]) -> Awaitable[None]:
        if not self.has_begun:
            return self._begin(message)
        return self._send(message) if message.get("more_body") else self._end(message)

    async def _begin(self, message: MutableMapping[str, Any]) -> None:
        self._on_begin()
        await self._send(message)  # a cancellation can only come before this sends anything
        self.has_begun = True
        for name, value in message.get("headers", ()):
            self.is_events |= name == b"content-type" and value.startswith(EventStream.media_type.encode())

    async def _end(self, message: MutableMapping[str, Any]) -> None:
        self._client.is_answered = True
        await self._send(message)
        self.is_complete = True
