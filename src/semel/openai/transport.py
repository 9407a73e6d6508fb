"""Transports for httpx, sync and async, around another one; and clients that have them.

`httpx2` has the same interface, and some packages take no other: name it as `library`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from functools import cache, partial
from types import ModuleType, TracebackType
from typing import Any, Final, Literal, Self

import httpx
from blake3 import blake3

from semel.openai.dialect import CHAT_COMPLETIONS, MESSAGES, RESPONSES, Dialect
from semel.openai.exchange import REPAIRED, EventReader, Exchange
from semel.openai.memory import Memory

__all__ = ["AsyncTransport", "Transport", "async_client", "client"]

_DIALECTS: Final[tuple[Dialect, ...]] = (CHAT_COMPLETIONS, RESPONSES, MESSAGES)
_CREDENTIALS: Final = ("authorization", "api-key", "x-api-key", "openai-organization", "openai-project")
_EVENTS: Final = "text/event-stream"
_JSON: Final = "application/json"


def client(*, memory: Memory | None = None, library: ModuleType = httpx, **options: Any) -> Any:
    """Return an `httpx.Client` for `openai.OpenAI(http_client=…)`, with the timeouts and limits of `openai` itself.

    `options` are those of `httpx.Client`. Clients that share a `memory` share what they have sent. Its type is `Any`:
    `openai` 3 names the class of httpx2, and takes both.
    """
    return _wrap(library.Client(**{**_defaults(library), **options}), Transport, memory, library)


def async_client(*, memory: Memory | None = None, library: ModuleType = httpx, **options: Any) -> Any:
    """Return an `httpx.AsyncClient` for `openai.AsyncOpenAI(http_client=…)`; the parameters are those of `client`."""
    return _wrap(library.AsyncClient(**{**_defaults(library), **options}), AsyncTransport, memory, library)


class Transport(httpx.BaseTransport):
    """A transport that sends media once to each server, through another one."""

    def __init__(
        self, inner: httpx.BaseTransport, memory: Memory | None = None, *, library: ModuleType = httpx
    ) -> None:
        self._inner = inner
        self._memory = Memory() if memory is None else memory
        self._library = library

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, changed or not, until it is answered."""
        if (exchange := _exchange(request, self._memory, self._library)) is None:
            return self._inner.handle_request(request)
        while True:
            response = self._inner.handle_request(_with_content(request, exchange))
            if response.status_code in REPAIRED and exchange.is_changed:
                answer = response.read()
                response.close()
                if exchange.repair(response.status_code, answer):
                    continue
                return _with_body(response, content=answer)
            break
        match _form(response, exchange):
            case "events":
                events = _stream_classes(self._library)[0](response, EventReader(exchange))
                return _with_body(response, stream=events)
            case "whole":
                content = response.read()
                response.close()
                return _with_body(response, content=exchange.read(content))
            case "foreign":
                return response

    def close(self) -> None:
        """Close the inner transport."""
        self._inner.close()

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        self._inner.__exit__(exc_type, exc_value, traceback)


class AsyncTransport(httpx.AsyncBaseTransport):
    """The same for `httpx.AsyncClient`."""

    def __init__(
        self, inner: httpx.AsyncBaseTransport, memory: Memory | None = None, *, library: ModuleType = httpx
    ) -> None:
        self._inner = inner
        self._memory = Memory() if memory is None else memory
        self._library = library

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, changed or not, until it is answered."""
        if (exchange := _exchange(request, self._memory, self._library)) is None:
            return await self._inner.handle_async_request(request)
        while True:
            response = await self._inner.handle_async_request(_with_content(request, exchange))
            if response.status_code in REPAIRED and exchange.is_changed:
                answer = await response.aread()
                await response.aclose()
                if exchange.repair(response.status_code, answer):
                    continue
                return _with_body(response, content=answer)
            break
        match _form(response, exchange):
            case "events":
                events = _stream_classes(self._library)[1](response, EventReader(exchange))
                return _with_body(response, stream=events)
            case "whole":
                content = await response.aread()
                await response.aclose()
                return _with_body(response, content=exchange.read(content))
            case "foreign":
                return response

    async def aclose(self) -> None:
        """Close the inner transport."""
        await self._inner.aclose()

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        await self._inner.__aexit__(exc_type, exc_value, traceback)


def _wrap(made: Any, kind: Any, memory: Memory | None, library: ModuleType) -> Any:
    """Wrap the transports of a made client: one that is given a transport ignores the proxies of the environment."""
    wrap = partial(kind, memory=Memory() if memory is None else memory, library=library)
    made._transport = wrap(made._transport)
    made._mounts = {pattern: None if one is None else wrap(one) for pattern, one in made._mounts.items()}
    return made


def _defaults(library: ModuleType) -> dict[str, Any]:
    """Return what `openai` and `anthropic` set for clients of their own."""
    return {
        "timeout": library.Timeout(600, connect=5.0),
        "limits": library.Limits(max_connections=1_000, max_keepalive_connections=100),
        "follow_redirects": True,
    }


def _exchange(request: httpx.Request, memory: Memory, library: ModuleType) -> Exchange | None:
    """Return the exchange of a request, if it is one to change. A body that is a stream is not read for it."""
    dialect = next((one for one in _DIALECTS if one.takes(request.url.path)), None)
    if dialect is None or request.method != "POST" or "content-encoding" in request.headers or not _is(request, _JSON):
        return None
    if not isinstance(request.stream, library.ByteStream):
        return None
    return Exchange.of(dialect, memory, _server(request), request.read())


def _server(request: httpx.Request) -> bytes:
    """Return a digest of the address and the credentials: ids are good for both."""
    state = blake3(str(request.url).partition("?")[0].encode())
    for name in _CREDENTIALS:
        state.update(f"\n{name}: {request.headers.get(name, '')}".encode("utf-8", "surrogatepass"))
    return state.digest()


def _with_content(request: httpx.Request, exchange: Exchange) -> httpx.Request:
    if not exchange.is_changed:
        return request
    headers = [(name, value) for name, value in request.headers.raw if name.lower() != b"content-length"]
    kind = type(request)
    return kind(request.method, request.url, headers=headers, content=exchange.content(), extensions=request.extensions)


def _form(response: httpx.Response, exchange: Exchange) -> Literal["events", "whole", "foreign"]:
    """Read the last response: a foreign one is passed on as it is. A request that was sent unchanged is accepted."""
    if not response.is_success:
        return "foreign"
    if not exchange.is_changed:
        exchange.accept()
        return "foreign"
    if _is(response, _EVENTS):
        return "events"
    return "whole" if _is(response, _JSON) else "foreign"


def _is(message: httpx.Request | httpx.Response, kind: str) -> bool:
    return bool(message.headers.get("content-type", "").partition(";")[0].strip().lower() == kind)


def _with_body(response: httpx.Response, **body: Any) -> httpx.Response:
    """Return the response with another `content` or `stream`, and without the headers of the one that came."""
    changed = (b"content-length", b"content-encoding", b"transfer-encoding")
    headers = [(name, value) for name, value in response.headers.raw if name.lower() not in changed]
    kind = type(response)
    return kind(response.status_code, headers=headers, extensions=response.extensions, **body)


@cache
def _stream_classes(library: ModuleType) -> tuple[Any, Any]:
    """Return the streams of events, sync and async, of the classes that the library's clients check for."""
    if library is httpx:
        return _Events, _AsyncEvents
    made = type("Events", (library.SyncByteStream,), {**vars(_Events)})
    return made, type("AsyncEvents", (library.AsyncByteStream,), {**vars(_AsyncEvents)})


class _Events(httpx.SyncByteStream):
    """A stream of events, read as it passes."""

    def __init__(self, response: httpx.Response, reader: EventReader) -> None:
        self._response = response
        self._reader = reader

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._response.iter_bytes():
            if seen := self._reader.feed(chunk):
                yield seen
        if rest := self._reader.end():
            yield rest

    def close(self) -> None:
        self._response.close()


class _AsyncEvents(httpx.AsyncByteStream):
    """The same for an async client."""

    def __init__(self, response: httpx.Response, reader: EventReader) -> None:
        self._response = response
        self._reader = reader

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._response.aiter_bytes():
            if seen := self._reader.feed(chunk):
                yield seen
        if rest := self._reader.end():
            yield rest

    async def aclose(self) -> None:
        await self._response.aclose()
