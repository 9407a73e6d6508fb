"""Counts each request, and gives it an id, a span and a log line, even if it fails with an unexpected error.

Probes are only counted: they come every few seconds and carry no information. A client's id is recorded next to semel's
own id and never replaces it: two clients may send the same id, and their requests must stay distinguishable.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, MutableMapping
from functools import partial
from time import perf_counter
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from semel.errors import InvalidKey, ServiceError
from semel.frontend.http.body import CLIENT_CLOSED
from semel.frontend.http.errors import MESSAGES, refusal
from semel.frontend.http.ignored_fields import IGNORED_FIELDS, IGNORED_FIELDS_HEADER
from semel.frontend.middleware.authentication import PROBES, tenant_name
from semel.frontend.middleware.concurrency import CUT_OFF
from semel.telemetry import Meter, metrics
from semel.telemetry.logs import ACCESS_LOGGER, SampledLog
from semel.telemetry.request_context import RequestContext, entered, tell_fault
from semel.telemetry.spans import Tracing, fail_span
from semel.web.peers import UNKNOWN

__all__ = ["RequestContextMiddleware"]

_MAX_ID_CHARS: Final = 128

logger = logging.getLogger(__name__)
access = logging.getLogger(ACCESS_LOGGER)


class RequestContextMiddleware:
    """Enters the context of each request, and records its outcome. Plain ASGI, as all middleware here."""

    def __init__(self, app: ASGIApp, tracing: Tracing, meter: Meter, *, log_requests: bool) -> None:
        self._app = app
        self._tracing = tracing
        self._meter = meter
        self._log_requests = log_requests
        self._strangers = SampledLog(access, logging.INFO)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http" or scope["path"] in PROBES:
            await self._app(scope, receive, partial(self._send, scope, send))
            return
        began, status = perf_counter(), None
        method: str = scope["method"]
        span = self._tracing.begin(method, Headers(scope=scope))
        request = RequestContext(secrets.token_hex(16), _client_id(scope), span, self._tracing.tracer)
        name = (request.client_id or request.request_id).encode("latin-1")
        headers = [(b"x-request-id", name)]
        if f"{scope['path']}/".startswith(f"{MESSAGES}/"):
            headers.append((b"request-id", name))

        def answer(message: MutableMapping[str, Any]) -> Awaitable[None]:
            """Send a part of the response. No coroutine: there is a call for each token."""
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *headers]
                return self._send(scope, send, message)
            return send(message)

        with entered(request):
            try:
                await self._app(scope, receive, answer)
            except Exception as error:  # the edge of the process: any error ends one request only
                if error is not scope.get(CUT_OFF):  # else the response is incomplete, so the connection is closed
                    logger.exception("a request failed in a way that we do not expect")
                    if status is not None:
                        raise
                    failure = ServiceError("internal error; the frontend's log says more")
                    await refusal(failure, scope)(scope, receive, answer)
            finally:
                if (cut := scope.get(CUT_OFF)) is not None:
                    tell_fault(cut)
                    logger.info("an answer was cut off: %s", cut)
                route = _route(scope)
                _close(request, method, route, status or CLIENT_CLOSED)
                if self._log_requests:
                    self._log(scope, route, status or CLIENT_CLOSED, perf_counter() - began)

    def _send(self, scope: Scope, send: Send, message: MutableMapping[str, Any]) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self._meter.count(metrics.REQUESTS, _route(scope), str(message["status"]))
            if (ignored := scope.get("state", {}).get(IGNORED_FIELDS)) is not None:
                message["headers"].append((IGNORED_FIELDS_HEADER.encode(), ignored.encode("latin-1")))
        return send(message)

    def _log(self, scope: Scope, route: str, status: int, seconds: float) -> None:
        """Log one line, with the client's address and the tenant of its key; a proxy in front is the client.

        The status is what was sent; of a response that was cut off after it, the line says so. Without a key anybody
        can cause lines, so those of refused keys are sampled (threats S28).
        """
        method, tenant = scope["method"], tenant_name(scope)
        client = (scope.get("client") or (UNKNOWN,))[0]
        fields = {"method": method, "route": route, "status": status, "seconds": round(seconds, 6)}
        fields |= {"client": client, "tenant": tenant or None}
        end = ""
        if CUT_OFF in scope:
            end, fields["cut_off"] = ", cut off,", True
        values = (method, route, status, end, seconds, client, f" ({tenant})" if tenant else "")
        text = "%s %s %d%s in %.3f s for %s%s"
        extra = {"fields": fields}
        if status == InvalidKey.status:
            self._strangers.log(text, *values, extra=extra)
        elif access.isEnabledFor(logging.INFO):  # not `access.info`, which looks up the caller: 9 µs of 26
            access.handle(access.makeRecord(access.name, logging.INFO, __file__, 0, text, values, None, extra=extra))


def _route(scope: Scope) -> str:
    return getattr(scope.get("route"), "path", "unknown")


def _client_id(scope: Scope) -> str | None:
    """Find the id in the client's header; the response's id ends with it. Internally, semel uses its own ids."""
    name = next((value for header, value in scope["headers"] if header == b"x-request-id"), b"").decode("latin-1")
    return name if name and len(name) <= _MAX_ID_CHARS and name.isprintable() else None


def _close(request: RequestContext, method: str, route: str, status: int) -> None:
    span = request.span
    if span.is_recording():
        span.update_name(f"{method} {route}")
        span.set_attribute("http.request.method", method)
        span.set_attribute("http.route", route)
        span.set_attribute("http.response.status_code", status)
        span.set_attribute("semel.request.id", request.request_id)
        if status >= 500:
            fail_span(span, str(status))
    span.end()
