"""A path prefix of a proxy that forwards requests with it: every route answers with the prefix and without."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["RootPath"]


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
