"""Who may use a frontend: one guard before every route but the two probes, whatever the route (threats S17).

It stands before routing and before a byte of the body is read. With no keys everybody is the same, unnamed tenant, and
`/metrics` answers here as vLLM's users expect; with keys it tells one tenant of the others, so it answers at the admin
address alone.
"""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from semel.core import Keyring
from semel.errors import InvalidKey
from semel.web.errors import error_response

__all__ = ["OPEN", "OPERATORS", "PROBES", "Authentication", "tenant_name"]

OPEN: Final = frozenset({"/health", "/ready"})
OPERATORS: Final = frozenset({"/metrics"})
PROBES: Final = OPEN | OPERATORS
"""What comes every few seconds, and is answered whatever happens to requests."""


class Authentication:
    """Lets requests with a key pass, and notes whose it is."""

    def __init__(self, app: ASGIApp, keys: Keyring) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http" or not len(self._keys) or scope["path"] in OPEN:
            await self._app(scope, receive, send)
            return
        name = None if scope["path"] in OPERATORS else self._keys.tenant(_bearer(Request(scope)))
        if name is None:
            refusal = error_response(
                InvalidKey("this needs `Authorization: Bearer KEY` with one of this server's API keys")
            )
            refusal.headers["WWW-Authenticate"] = "Bearer"
            await refusal(scope, receive, send)
            return
        scope.setdefault("state", {})["tenant"] = name
        await self._app(scope, receive, send)


def tenant_name(request: Request) -> str:
    """The tenant whose key came with a request; without keys everybody is the same."""
    name: str = getattr(request.state, "tenant", "")
    return name


def _bearer(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
