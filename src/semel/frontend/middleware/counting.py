"""Counts requests by route and status."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from semel.telemetry import Meter, metrics

__all__ = ["RequestCounter"]


class RequestCounter:
    """Counts requests by route and status. Plain ASGI: a middleware of functions would hide disconnects."""

    def __init__(self, app: ASGIApp, meter: Meter) -> None:
        self._app = app
        self._meter = meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""

        async def count(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "unknown")
                self._meter.count(metrics.REQUESTS, route, str(message["status"]))
            await send(message)

        await self._app(scope, receive, count)
