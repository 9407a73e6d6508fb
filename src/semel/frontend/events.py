"""Server-sent events over answers that are being generated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from semel.engine import Output, Stream

__all__ = ["DONE", "EventStream", "event", "merged"]

DONE: Final = b"data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """Server-sent events, which close their streams even if not one of them was ever sent."""

    def __init__(self, streams: Sequence[Stream], events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            for stream in self._streams:
                await stream.close()


def event(body: Mapping[str, Any]) -> bytes:
    """One event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def merged(streams: Sequence[Stream]) -> AsyncIterator[tuple[int, Output]]:
    """The outputs of all streams as they come, each with the index of its stream."""
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
