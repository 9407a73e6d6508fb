"""Authentication: one check before every route except the probes (threats S17).

It runs before routing and before a byte of the body is read. Without API keys, all clients are the same unnamed tenant,
and `/metrics` is served here, as vLLM's users expect. With API keys, metrics would show one tenant what others do, so
only the admin address serves them.

Refusals are counted, and delayed by address once there are many; while one waits, its connection may be closed for
another (threats S25). A request with a valid key does not wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from semel.core import Keyring
from semel.errors import InvalidKey
from semel.frontend.http.errors import name_route, refusal
from semel.telemetry.request_context import entered_as
from semel.web.admission import mark_evictable
from semel.web.peers import UNKNOWN, network_of

__all__ = ["OPEN", "OPERATORS", "PROBES", "Authentication", "tenant_name"]

OPEN: Final = frozenset({"/health", "/ping", "/ready"})
OPERATORS: Final = frozenset({"/metrics"})
PROBES: Final = OPEN | OPERATORS
"""Paths that are requested every few seconds, and are served in every state of the frontend."""


class Authentication:
    """Lets requests with a valid key pass, and records their tenant."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Keyring,
        count: Callable[[str], None] = lambda _: None,
        wait_s: Callable[[str], float] = lambda _: 0.0,
    ) -> None:
        """`count` receives the code of each refusal; `wait_s` returns how long the next one of an address waits."""
        self._app = app
        self._keys = keys
        self._count = count
        self._wait_s = wait_s

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Pass a request on, or refuse it. Without keys no coroutine: each token would resume it."""
        if scope["type"] != "http" or not len(self._keys) or scope["path"] in OPEN:
            return self._app(scope, receive, send)
        return self._check(scope, receive, send)

    async def _check(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = _key(Request(scope))
        name = None if scope["path"] in OPERATORS else self._keys.tenant(key)
        if name is None:
            await self._refuse(_fault(scope["path"], key), scope, receive, send)
            return
        scope.setdefault("state", {})["tenant"] = name
        with entered_as(name):
            await self._app(scope, receive, send)

    async def _refuse(self, error: InvalidKey, scope: Scope, receive: Receive, send: Send) -> None:
        self._count(error.code)
        name_route(scope)
        mark_evictable(scope)
        if wait_s := self._wait_s(network_of((scope.get("client") or (UNKNOWN,))[0])):
            await asyncio.sleep(wait_s)
        response = refusal(error, scope)
        response.headers["WWW-Authenticate"] = "Bearer"
        await response(scope, receive, send)


def tenant_name(scope: Scope) -> str:
    """Return the tenant of a request's API key. Without API keys all requests have the same."""
    name: str = scope.get("state", {}).get("tenant", "")
    return name


def _fault(path: str, key: str) -> InvalidKey:
    if path in OPERATORS:
        return InvalidKey(f"with API keys, no key opens {path} here: read it at the frontend's --metrics-port")
    if key:
        return InvalidKey("this key is unknown: send one of this server's keys")
    return InvalidKey("this needs `Authorization: Bearer KEY` or `x-api-key: KEY` with one of this server's keys")


def _key(request: Request) -> str:
    """The key of a request: OpenAI's clients send `Authorization`, which counts if both are there, Anthropic's the
    other one."""
    if "authorization" not in request.headers:
        return request.headers.get("x-api-key", "").strip()
    scheme, _, key = request.headers["authorization"].partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
