"""The HTTP server around the application: uvicorn, whose signals and socket are ours."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from semel.errors import ConfigError

__all__ = ["HttpServer"]

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

    def stop(self) -> None:
        """Take no more connections, give the open ones a moment, and end `serve`."""
        self._server.should_exit = True


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
