"""The HTTP server of an application: uvicorn with semel's signals, socket and deadlines; the operators' routes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from http import HTTPStatus
from typing import Any, Final

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from semel.errors import HeadTooLarge, InvalidRequest, RequestError, RequestTooSlow
from semel.telemetry import Meter
from semel.web.address import bind
from semel.web.errors import error_body
from semel.web.limits import ConnectionLimits
from semel.web.responses import readiness_response

__all__ = ["STALLED", "ConnectionLimits", "HttpServer", "operator_routes"]

_BACKLOG: Final = 2_048
_GRACE_S: Final = 3

STALLED: Final = "client_stalled"
"""The code that is counted when a client does not read its response. The client gets no error, because it does not
read.
"""


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
    ) -> None:
        """`count` receives the code of each request that is refused, or dropped, before it reaches an application.

        `port_flag` and `host_flag` are the flags that an error names if the address cannot be bound.
        """
        limits = limits or ConnectionLimits()
        self._releasing = asyncio.Event()
        self._socket = bind(host, port, port_flag, host_flag)
        self._socket.listen(_BACKLOG)
        self._server = _Server(
            uvicorn.Config(
                app,
                http=partial(_Connection, limits, count, self._releasing),  # type: ignore[arg-type]
                ws="none",  # no route uses websockets, and their handshake has no deadline
                access_log=False,
                log_config=None,
                timeout_graceful_shutdown=_GRACE_S,
                timeout_keep_alive=limits.idle_s,  # type: ignore[arg-type]
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

    def release(self) -> None:
        """Keep serving, but close each connection after its current response, or its next one if there is none."""
        self._releasing.set()
        for connection in self._server.server_state.connections:
            assert isinstance(connection, _Connection)
            connection.release()

    def stop(self, *, at_once: bool = False) -> None:
        """Accept no more connections and end `serve`. Open connections get a moment to finish, unless `at_once`."""
        self._server.should_exit = True
        self._server.force_exit = at_once


def operator_routes(meter: Meter, reason: Callable[[], str]) -> list[Route]:
    """The routes for liveness, readiness (with the reason against it) and metrics."""

    async def health(_: Request) -> Response:
        return Response(status_code=200)

    async def ready(_: Request) -> Response:
        return readiness_response(reason())

    async def metrics(_: Request) -> Response:
        return Response(await meter.scrape(), media_type=CONTENT_TYPE_LATEST)

    return [Route("/health", health), Route("/ready", ready), Route("/metrics", metrics)]


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers: the process decides the order of its shutdown."""
        yield


class _Connection(HttpToolsProtocol):
    """uvicorn's connection plus the deadlines that it lacks, and errors in OpenAI's shape.

    A timer runs while no response is in progress, and while a client does not read; a token of a stream sets none. A
    response may be complete before its request is. The rest of the request is then discarded: closing a socket with
    unread bytes resets the connection, and a client that is reset while it sends does not read the response.
    """

    def __init__(
        self, limits: ConnectionLimits, count: Callable[[str], None], releasing: asyncio.Event, **options: Any
    ) -> None:
        super().__init__(**options)
        self._limits = limits
        self._count = count
        self._releasing = releasing
        self._idle: asyncio.TimerHandle | None = None
        self._headers: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._is_coming = False
        """Whether the body of the last request is incomplete."""

        self._is_ending = False
        """Whether the connection closes as soon as that body is complete."""

        self._unread_bytes = 0
        self._head_bytes = self._head_fields = 0
        """The parsed bytes and fields of the current request's head and trailers."""

        self._unparsed_bytes = 0
        """The bytes received since the parser's last callback: part of a head or of trailers."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._response_transport = _ResponseTransport(transport, self._end)
        self._idle = self.loop.call_later(self._limits.idle_s, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._idle, self._headers, self._stall):
            _cancel(timer)
        self._response_transport.close = (
            self.transport.close
        )  # breaks a reference cycle, which would wait for the garbage collector
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unparsed_bytes += len(data)
        super().data_received(data)
        if self._unparsed_bytes > self._limits.head_bytes:
            self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = self._head_fields = self._unparsed_bytes = 0
        if self.transport.is_closing():
            return
        _cancel(self._idle)
        self._headers = self.loop.call_later(self._limits.headers_s, self._give_up_headers)

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        if self._head_bytes <= self._limits.head_bytes:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header. If there are too many, store nothing more and refuse the request."""
        self._head_fields += 1
        self._head_bytes += len(name) + len(value)
        if self._is_head_too_large():
            self._refuse_head()
        else:
            super().on_header(name, value)

    def on_chunk_header(self) -> None:
        """httptools calls this at the beginning of each chunk of a body; trailers follow the last chunk."""
        self._unparsed_bytes = 0

    def on_headers_complete(self) -> None:
        self._unparsed_bytes = 0
        if self._is_head_too_large():
            self._refuse_head()
        _cancel(self._headers)
        self._headers = None
        if self.transport.is_closing():  # it arrived together with the end of the discarded bytes
            return
        super().on_headers_complete()
        self.cycle.transport = self._response_transport  # type: ignore[assignment]
        if self._releasing.is_set():
            self.cycle.keep_alive = False
        self._is_coming, self._unread_bytes = True, 0

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        if self.transport.is_closing():
            return
        super().on_body(body)
        if self.cycle.response_complete:
            self._unread_bytes += len(body)
            if self._unread_bytes > self._limits.unread_bytes:
                self._close()

    def on_message_complete(self) -> None:
        if self.transport.is_closing() and (self.cycle is None or self._is_head_too_large()):
            return  # the request was refused before it had a cycle
        super().on_message_complete()
        self._is_coming = False
        if self._is_ending:
            self._close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # uvicorn stops its idle timer with any byte; here only a new request stops it.
        idle, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        if self._headers is None:
            self._idle = idle
        else:
            _cancel(idle)

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_client()

    def resume_writing(self) -> None:
        _cancel(self._stall)
        super().resume_writing()
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._watch_client()

    def shutdown(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self._end()
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 uvicorn's
        self._refuse(InvalidRequest("this is no HTTP request that can be read: send HTTP/1.1"))

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: such a request is served like any other."""

    def release(self) -> None:
        """Close after the current response. If there is none, stay open: a request may be on its way."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False

    def _give_up_headers(self) -> None:
        limit_s = self._limits.headers_s
        self._refuse(RequestTooSlow(f"the headers took longer than {limit_s:g} s to come; raise it with --max-body-s"))

    def _is_head_too_large(self) -> bool:
        return self._head_bytes > self._limits.head_bytes or self._head_fields > self._limits.head_fields

    def _refuse_head(self) -> None:
        limits = self._limits
        self._refuse(
            HeadTooLarge(
                f"the request line and headers are over {limits.head_bytes:,} bytes or {limits.head_fields} fields: "
                "send what is long in the body"
            )
        )

    def _end(self) -> None:
        """Close; if the response is complete and its request is not, close when the request is complete."""
        if self._is_coming and self.cycle.response_complete:
            self._is_ending = True
        else:
            self._close()

    def _close(self) -> None:
        if self.transport.is_closing():
            return
        self.transport.close()
        if self.transport.get_write_buffer_size():  # the buffer is sent before the socket closes
            self._watch_client()

    def _watch_client(self) -> None:
        _cancel(self._stall)
        self._stall = self.loop.call_later(self._limits.stall_s, self._give_up_client)

    def _give_up_client(self) -> None:
        self._count(STALLED)
        self.transport.abort()

    def _refuse(self, error: RequestError) -> None:
        if self.transport.is_closing():
            return
        self._count(error.code)
        under_way = self.cycle is not None and not self.cycle.response_complete
        if under_way and (self.cycle.response_started or not self._is_coming):
            self._close()  # a second response would corrupt or replace the first
            return
        body = json.dumps(error_body(str(error), code=error.code, status=error.status)).encode()
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self._close()


class _ResponseTransport:
    """The transport that a response uses. Its connection decides when to close."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
