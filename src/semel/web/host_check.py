"""The check of the `Host` and `Origin` headers, for servers that only this machine reaches (threats S25).

A web page can send requests to 127.0.0.1 from a browser of this machine. It cannot read the answers, but work is done
for it; the browser names the page's origin, so it is refused here. By DNS rebinding, a name of the page's own becomes
127.0.0.1, and then it could read the answers too. But the browser names that host, so it is refused as well.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from semel.errors import ForeignOrigin, MisdirectedRequest, SemelError
from semel.web.errors import error_response
from semel.web.peers import is_loopback

__all__ = ["HostCheck", "RootPath", "allowed_hosts_at", "is_allowed_host"]

LOCAL: Final = "localhost"
_CHECKED: Final = (b"host", b"origin")


def allowed_hosts_at(host: str, names: Sequence[str], *, has_keys: bool) -> tuple[str, ...]:
    """Return the hosts that requests to a server at `host` may name, besides this machine's own; empty if any may.

    No web page has an API key: with keys, and without names, nothing is checked.
    """
    if "*" in names or not (names or (is_loopback(host) and not has_keys)):
        return ()
    return tuple(dict.fromkeys(name.lower().rstrip(".") for name in (host, LOCAL, *names)))


def is_allowed_host(header: str, allowed: Sequence[str]) -> bool:
    """Return whether a `Host` header names this machine or one of these hosts; `.example.com` means all below it."""
    host = header.rpartition(":")[0] if header.rpartition(":")[2].isdigit() and not header.endswith("]") else header
    host = host.strip("[]").lower().rstrip(".")
    if host in allowed or is_loopback(host) or host.endswith(f".{LOCAL}"):
        return True
    return any(name.startswith(".") and host.endswith(name) for name in allowed)


class HostCheck:
    """Refuses requests for another host with 421, and those of pages from another host with 403."""

    def __init__(
        self,
        app: ASGIApp,
        allowed: Sequence[str],
        origins: Sequence[str] = (),
        count: Callable[[str], None] = lambda _: None,
        respond: Callable[[SemelError, Scope], Response] = lambda error, _: error_response(error),
    ) -> None:
        """Pages of `origins` are allowed too, with "*" all. `count` receives the code of each refusal; `respond` makes
        its response."""
        self._app = app
        self._allowed = tuple(allowed)
        self._origins = frozenset(origins)
        self._count = count
        self._respond = respond
        self._passed: list[tuple[bytes, bytes]] | None = None
        """The checked headers of the last request that passed: most clients name the same host each time."""

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Pass a request on, or refuse it. No coroutine of its own: each token would resume it."""
        error = self._refusal(scope) if scope["type"] == "http" else None
        if error is None:
            return self._app(scope, receive, send)
        self._count(error.code)
        return self._respond(error, scope)(scope, receive, send)

    def _refusal(self, scope: Scope) -> MisdirectedRequest | ForeignOrigin | None:
        headers = [header for header in scope["headers"] if header[0] in _CHECKED]
        if headers == self._passed:
            return None
        error = self._check(headers)
        if error is None:
            self._passed = headers
        return error

    def _check(self, headers: Sequence[tuple[bytes, bytes]]) -> MisdirectedRequest | ForeignOrigin | None:
        # No browser leaves out the host, and none sends two.
        hosts, origins = ([value.decode("latin-1") for name, value in headers if name == kind] for kind in _CHECKED)
        if len(hosts) > 1 or not all(is_allowed_host(host, self._allowed) for host in hosts):
            return MisdirectedRequest(
                "this server is not the host that the request names: connect to it by its address, or name the host "
                "with --allowed-hosts"
            )
        if not all(map(self._is_allowed_origin, origins)):
            return ForeignOrigin(
                "web pages of other origins may not call this server: name the origin with --allowed-origins"
            )
        return None

    def _is_allowed_origin(self, origin: str) -> bool:
        scheme, _, host = origin.partition("://")
        is_ours = scheme in ("http", "https") and is_allowed_host(host, self._allowed)
        return is_ours or bool({origin, "*"} & self._origins)


class RootPath:
    """Takes a prefix off the path of every request that has it, before anything else looks at the path."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = f"/{prefix.strip('/')}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http" and scope["path"].startswith(f"{self._prefix}/"):
            scope = {**scope, "path": scope["path"][len(self._prefix) :]}
            scope.pop("raw_path", None)  # it has the prefix, escaped in the client's own way
        await self._app(scope, receive, send)
