"""The HTTP server of an application: uvicorn with semel's signals, socket and deadlines; the operators' routes."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from socket import socket
from typing import Final

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from semel.telemetry import Meter, metrics
from semel.telemetry.meter import Sample
from semel.web.admission import REASONS, Place
from semel.web.connection import STALLED, Connection
from semel.web.limits import ConnectionLimits
from semel.web.listener import Listener, admission_of, bind
from semel.web.responses import readiness_response

__all__ = ["STALLED", "ConnectionLimits", "HttpServer", "operator_routes"]

_BACKLOG: Final = 2_048
_GRACE_S: Final = 3
_PROBES: Final = frozenset({"/health", "/ready", "/metrics"})


class HttpServer:
    """Serves an application at a host and port until it is stopped."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        limits: ConnectionLimits | None = None,
        count: Callable[[str], None] = lambda _: None,
        *,
        port_flag: str = "--port",
        host_flag: str = "--host",
        probes: frozenset[str] = _PROBES,
        proxies: tuple[str, ...] = (),
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`count` receives the code of each request that is refused, or dropped, before it reaches an application.

        `port_flag` and `host_flag` are the flags that an error names if the address cannot be bound. `probes` are the
        paths that are answered beyond the limit of connections. `proxies` are the networks whose `X-Forwarded-For` is
        believed.
        """
        limits = limits or ConnectionLimits()
        self._releasing = asyncio.Event()
        self._socket = bind(host, port, port_flag, host_flag)
        self._socket.listen(_BACKLOG)
        self._admission = admission_of(limits)
        first_s = min(limits.first_s, limits.idle_s)
        self._listener = Listener(self._socket, self._admission, first_s=first_s, proxies=proxies, tls=tls)
        self._server = _Server(
            self._listener,
            partial(Connection, limits, count, self._releasing, probes),
            uvicorn.Config(
                app,
                interface="asgi3",
                http=HttpToolsProtocol,
                ws="none",  # no route uses websockets, and their handshake has no deadline
                access_log=False,
                log_config=None,
                timeout_graceful_shutdown=_GRACE_S,
                timeout_keep_alive=limits.idle_s,  # type: ignore[arg-type]
                lifespan="off",
                proxy_headers=bool(proxies),
                forwarded_allow_ips=list(proxies),
            ),
        )

    def use_tls(self, tls: ssl.SSLContext) -> None:
        """Serve the connections that come from now on with this certificate."""
        self._listener.tls = tls

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics of its connections."""
        for state, count in self._admission.by_stage():
            yield metrics.CONNECTIONS, count, (state,)
        yield metrics.CONNECTIONS_LIMIT, self._admission.shares.capacity, ()
        for reason in REASONS:
            yield metrics.CONNECTIONS_CLOSED, self._admission.closed[reason], (reason,)

    async def serve(self) -> None:
        """Serve until `stop`."""
        await self._server.serve(sockets=[self._socket])
        if self._server.failure is not None:
            raise self._server.failure

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve while the context is entered."""
        serving = asyncio.create_task(self.serve())
        try:
            yield
        finally:
            self.stop()
            await asyncio.gather(serving, return_exceptions=True)

    def release(self) -> None:
        """Keep serving, but close each connection after its current response, or its next one if there is none."""
        self._releasing.set()
        for connection in self._server.server_state.connections:
            assert isinstance(connection, Connection)
            connection.release()

    def stop(self, *, at_once: bool = False) -> None:
        """Accept no more connections and end `serve`. Open connections get a moment to finish, unless `at_once`."""
        self._server.should_exit = True
        self._server.force_exit = at_once
        if at_once:  # their requests see that the client has left, and end in order
            for connection in list(self._server.server_state.connections):
                assert isinstance(connection, Connection)
                connection.transport.abort()


def operator_routes(meter: Meter, reason: Callable[[], str]) -> list[Route]:
    """Return the routes for liveness, readiness (with the reason against it) and metrics."""

    async def health(_: Request) -> Response:
        return Response(status_code=200)

    async def ready(_: Request) -> Response:
        return readiness_response(reason())

    async def metrics(_: Request) -> Response:
        return Response(await meter.scrape(), media_type=CONTENT_TYPE_LATEST)

    return [Route("/health", health), Route("/ready", ready), Route("/metrics", metrics)]


class _Server(uvicorn.Server):
    def __init__(self, listener: Listener, connect: Callable[..., asyncio.Protocol], config: uvicorn.Config) -> None:
        super().__init__(config)
        self._listener = listener
        self._connect = connect
        self._accepting: asyncio.Task[None] | None = None
        self.failure: BaseException | None = None
        """The reason for which no more connections are accepted."""

    async def startup(self, sockets: list[socket] | None = None) -> None:  # noqa: ARG002 uvicorn's
        """Accept connections: by the listener, not by the event loop."""
        await self.lifespan.startup()
        self.servers = []
        self._accepting = asyncio.create_task(self._listener.accept(self._new_connection))
        self._accepting.add_done_callback(self._stop_accepting)
        self.started = True

    def _stop_accepting(self, accepting: asyncio.Task[None]) -> None:
        """Stop a server that accepts nothing: it ends with an error."""
        if not accepting.cancelled() and (error := accepting.exception()) is not None:
            self.failure = error
            self.should_exit = True

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        assert self._accepting is not None
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        await self._listener.close()
        await super().shutdown(sockets)

    def _new_connection(self, place: Place) -> asyncio.Protocol:
        return self._connect(
            place=place, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers: the process decides the order of its shutdown."""
        yield
