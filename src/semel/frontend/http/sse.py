"""Server-sent events over answers that are being generated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from semel.core import Output
from semel.engine import Stream
from semel.errors import SemelError
from semel.frontend.budget import Account
from semel.web.errors import public_error_body

__all__ = [
    "DONE",
    "EventFormat",
    "EventStream",
    "error_event",
    "event",
    "merged",
    "named_event",
    "stream_ending",
    "until_gone",
]

DONE: Final = b"data: [DONE]\n\n"
_ENDING: Final = "semel.stream_ending"
"""The key under which a stream that is being sent has its format, in the request's scope."""


class EventStream(Response):
    """Server-sent events. They close their streams even if no event was sent or the client disconnected.

    It implements ASGI itself. Starlette's streaming response adds two tasks and a task group per response, which cost 7
    KiB of memory, and 1.2 µs per event.
    """

    media_type = "text/event-stream"

    def __init__(
        self, streams: Sequence[Stream], events: AsyncIterator[bytes], form: EventFormat | None = None
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({})
        self._streams = streams
        self._events = events
        self._form = form or EventFormat()
        self.account: Account | None = None
        """The account of the request, until its first output closes it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        scope[_ENDING] = self._form
        try:
            await _unless_gone(receive, self._send(send))
        finally:
            await self.close()

    async def close(self) -> None:
        """Close the streams. A response that will not be sent needs nothing else."""
        for stream in self._streams:
            await stream.close()

    async def _send(self, send: Send) -> None:
        with nullcontext() if self.account is None else self.account.revocable():  # a client that reads nothing yields
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for one in self._events:
            await send({"type": "http.response.body", "body": one, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` in the current task; cancel it as soon as the client disconnects."""
    working = asyncio.current_task()
    assert working is not None
    gone = over = False

    def leave(_: asyncio.Future[None]) -> None:
        nonlocal gone
        if not over:
            gone = True
            working.cancel()

    watching = asyncio.ensure_future(until_gone(receive))
    watching.add_done_callback(leave)
    try:
        await work
    except asyncio.CancelledError:
        if not gone or working.uncancel() > 0:  # another caller cancelled this task too
            raise
    finally:
        over = True
        watching.cancel()


async def until_gone(receive: Receive) -> None:
    """Wait until the client disconnects. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def event(body: object) -> bytes:
    """Encode one event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def named_event(body: msgspec.Struct) -> bytes:
    """Encode one event whose name is the type in its body."""
    return b"event: %b\ndata: %b\n\n" % (str(body.__struct_config__.tag).encode(), msgspec.json.encode(body))


def error_event(error: SemelError) -> bytes:
    """The event that ends a stream with an error."""
    return event(public_error_body(error))


@dataclass(frozen=True, slots=True)
class EventFormat:
    """The form of one stream's events: by default that of OpenAI's chats."""

    encode: Callable[[Any], bytes] = event
    error: Callable[[SemelError], bytes] = error_event
    """Encodes the event for an error that ends the stream."""

    done: bytes = DONE
    """What every stream ends with."""


def stream_ending(scope: Scope, error: SemelError) -> bytes:
    """What ends a stream that is being sent, with an error."""
    form: EventFormat = scope.get(_ENDING) or EventFormat()
    return form.error(error) + form.done


async def merged(streams: Sequence[Stream]) -> AsyncIterator[tuple[int, Output]]:
    """The outputs of all streams as they arrive, each with the index of its stream."""
    iterators = [aiter(stream) for stream in streams]
    waiting = {asyncio.ensure_future(anext(iterator, None)): index for index, iterator in enumerate(iterators)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = waiting.pop(task)
                if (output := task.result()) is not None:
                    yield index, output
                    waiting[asyncio.ensure_future(anext(iterators[index], None))] = index
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
