"""One connection of a client: uvicorn's, with deadlines, limits, a place, and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final

from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from semel.errors import HeadTooLarge, InvalidRequest, RequestError, RequestTooSlow, ServiceError, TooManyConnections
from semel.web.admission import EXPENDABLE, Place, Stage
from semel.web.disconnect import DISCONNECT
from semel.web.errors import error_body
from semel.web.limits import ConnectionLimits
from semel.web.peers import plain_address

__all__ = ["STALLED", "Connection"]

STALLED: Final = "client_stalled"
"""The code that is counted when a client does not read its response. The client gets no error, because it does not
read.
"""

_RESERVED_S: Final = 1.0
"""Seconds for which a connection in the reserve may be silent."""


class Connection(HttpToolsProtocol):
    """uvicorn's connection plus the deadlines that it lacks, and errors in OpenAI's shape.

    A timer runs while no response is in progress, and while a client does not read; a token of a stream sets none. A
    response may be complete before its request is. The rest of the request is then discarded: closing a socket with
    unread bytes resets the connection, and a client that is reset while it sends does not read the response.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        count: Callable[[str], None],
        releasing: asyncio.Event,
        probes: frozenset[str],
        place: Place,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._limits = limits
        self._count = count
        self._releasing = releasing
        self._probes = probes
        self._place = place
        self._rest = Stage.IDLE
        """The stage after the current response."""

        self._idle: asyncio.TimerHandle | None = None
        self._headers: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None
        """The request that is answered; `cycle` is the last one that has come."""

        self._is_coming = False
        """True while the body of the last request is incomplete."""

        self._is_ending = False
        """True if the connection closes as soon as that body is complete."""

        self._unread_bytes = 0
        self._head_bytes = self._head_fields = 0
        """The parsed bytes and fields of the current request's head and trailers."""

        self._unparsed_bytes = 0
        """The bytes received since the parser's last callback: part of a head or of trailers."""

        self._on_disconnect: list[Callable[[], None]] = []
        """The calls to make if the client disconnects before the current response is complete."""

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.client is not None:
            self.client = plain_address(self.client[0]), self.client[1]
        self._response_transport = _ResponseTransport(transport, self._end)
        self._place.on_eviction = transport.abort
        self._wait_for_first()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._place.release()
        for timer in (self._idle, self._headers, self._stall):
            _cancel(timer)
        # Breaks a reference cycle, which would wait for the garbage collector.
        self._response_transport.close = self.transport.close
        super().connection_lost(exc)
        if self._running is not None:
            self._running.disconnected = True  # uvicorn tells only the last one
            self._running.message_event.set()
        calls, self._on_disconnect = self._on_disconnect, []
        for call in calls:
            call()

    @override
    def data_received(self, data: bytes) -> None:
        self._unparsed_bytes += len(data)
        super().data_received(data)
        if self._unparsed_bytes > self._limits.head_bytes:
            self._refuse_head()

    @override
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = self._head_fields = self._unparsed_bytes = 0
        if self.transport.is_closing():
            return
        _cancel(self._idle)
        self._headers = self.loop.call_later(self._limits.headers_s, self._give_up_headers)

    @override
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

    @override
    def on_headers_complete(self) -> None:
        self._unparsed_bytes = 0
        if self._is_head_too_large():
            self._refuse_head()
        _cancel(self._headers)
        self._headers = None
        if self.transport.is_closing():  # it arrived together with the end of the discarded bytes
            return
        if not self._may_begin():
            return
        super().on_headers_complete()
        self.cycle.transport = self._response_transport  # type: ignore[assignment]
        self._running = self._running or self.cycle
        if self._releasing.is_set() or self._place.is_reserved:
            self.cycle.keep_alive = False
        self._is_coming, self._unread_bytes = True, 0

    @override
    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        if self.transport.is_closing():
            return
        super().on_body(body)
        if self.cycle.response_complete:
            self._unread_bytes += len(body)
            if self._unread_bytes > self._limits.unread_bytes:
                self._close()

    @override
    def on_message_complete(self) -> None:
        if self.transport.is_closing() and (self.cycle is None or self._is_head_too_large()):
            return  # the request was refused before it had a cycle
        super().on_message_complete()
        self._is_coming = False
        # A long body has paused it, and a client that leaves is only noticed by reading.
        if self.flow.read_paused and not self.pipeline and not self.transport.is_closing():
            self.flow.resume_reading()
        if self._is_ending:
            self._close()

    @override
    def on_response_complete(self) -> None:
        self._on_disconnect.clear()
        self._running = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        if self.cycle.response_complete:  # else the next one was sent ahead
            self._place.enter(self._rest)
        # uvicorn stops its idle timer with any byte; here only a new request stops it.
        idle, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None
        if self._headers is None:
            self._idle = idle
        else:
            _cancel(idle)

    @override
    def timeout_keep_alive_handler(self) -> None:
        self._close()

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_client()

    @override
    def resume_writing(self) -> None:
        _cancel(self._stall)
        super().resume_writing()
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._watch_client()

    @override
    def shutdown(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self._end()
        else:
            super().shutdown()

    @override
    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidRequest("this is no HTTP request that can be read: send HTTP/1.1"))

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: such a request is served like any other."""

    def release(self) -> None:
        """Close after the current response. If there is none, stay open: a request may be on its way."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False

    def _wait_for_first(self) -> None:
        limits = self._limits
        first_s = _RESERVED_S if self._place.is_reserved else min(limits.first_s, limits.idle_s)
        self._idle = self.loop.call_later(first_s, self._give_up_silent)

    def _give_up_silent(self) -> None:
        self._place.give_up("late")
        self._close()

    def _may_begin(self) -> bool:
        """Return whether the request whose head has come is answered; else it is refused here."""
        is_probe = self.url.partition(b"?")[0].decode("latin-1") in self._probes
        if self._place.is_reserved and not is_probe:
            self._refuse(
                TooManyConnections("the server has as many connections as it takes (--max-connections): try again soon")
            )
            return False
        if len(self.pipeline) >= self._limits.pipelined:
            self._refuse(InvalidRequest(f"over {self._limits.pipelined} requests were sent ahead of their responses"))
            return False
        # A client that has only asked for our health can be closed for another, once that is answered.
        self._rest = Stage.SILENT if is_probe else Stage.IDLE
        self._place.enter(Stage.BUSY)
        self.scope["extensions"] = {
            EXPENDABLE: {"give_up": self._mark_evictable},
            DISCONNECT: {"watch": self._watch_disconnect},
        }
        return True

    def _watch_disconnect(self, call: Callable[[], None]) -> None:
        if self._place.stage is None:  # it has disconnected
            self.loop.call_soon(call)
            return
        self._on_disconnect.append(call)
        if self.pipeline and not self.transport.is_closing():  # a request that was sent ahead has paused it
            self.flow.resume_reading()

    def _mark_evictable(self) -> None:
        self._rest = Stage.SILENT
        self._place.enter(Stage.SILENT)

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

    def _refuse(self, error: RequestError | ServiceError) -> None:
        if self.transport.is_closing():
            return
        self._count(error.code)
        under_way = self.cycle is not None and not self.cycle.response_complete
        if under_way and (self.cycle.response_started or not self._is_coming):
            self._close()  # a second response would corrupt or replace the first
            return
        body = json.dumps(error_body(str(error), code=error.code, status=error.status)).encode()
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nContent-Type: application/json\r\n"
        if isinstance(error, ServiceError):
            head += f"Retry-After: {error.retry_after_s:.0f}\r\n"
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
