"""The HTTP server around an application: uvicorn with signals and a socket of ours; the routes of operators; errors."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Final

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from semel.errors import ConfigError
from semel.telemetry import Meter

__all__ = ["HttpServer", "error_body", "operator_routes"]

_BACKLOG: Final = 2_048
_GRACE_S: Final = 3


class HttpServer:
    """Serves an application at a host and port until it is stopped."""

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        self._socket = _bind(host, port)
        self._server = _Server(
            uvicorn.Config(
                app,
                access_log=False,
                log_config=None,
                timeout_graceful_shutdown=_GRACE_S,
                timeout_keep_alive=75,
                lifespan="off",
            )
        )

    async def serve(self) -> None:
        """Serve until `stop`."""
        await self._server.serve(sockets=[self._socket])

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve while the context is entered."""
        serving = asyncio.create_task(self.serve())
        try:
            yield
        finally:
            self.stop()
            await asyncio.gather(serving, return_exceptions=True)

    def stop(self) -> None:
        """Take no more connections, give the open ones a moment, and end `serve`."""
        self._server.should_exit = True


def operator_routes(meter: Meter) -> list[Route]:
    """Whether the process is alive, and its metrics."""

    async def health(_: Request) -> Response:
        return Response(status_code=200)

    async def metrics(_: Request) -> Response:
        return Response(meter.render(), media_type=CONTENT_TYPE_LATEST)

    return [Route("/health", health), Route("/metrics", metrics)]


def error_body(message: str, *, code: str, status: int) -> Mapping[str, Any]:
    """An error as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: the process decides in which order things end."""
        yield


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot serve at {host}:{port}: {error.strerror}; choose another --host or --port") from None
    bound.listen(_BACKLOG)
    return bound
