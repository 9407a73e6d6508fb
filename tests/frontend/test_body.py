"""Work for a client that may leave, within a deadline that may pass: what it has made is sent or closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, MutableMapping
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from semel.frontend.http.body import CLIENT_CLOSED, unless_disconnected
from semel.frontend.http.sse import EventStream
from tests.frontend.test_concurrency import Stalled

DEADLINE_S = 30


async def nothing() -> AsyncIterator[bytes]:
    yield b""


def after(turns: int, call: Callable[[], object]) -> None:
    """Call something in so many turns of the loop."""
    if turns:
        asyncio.get_running_loop().call_soon(after, turns - 1, call)
    else:
        call()


def request(left: asyncio.Event) -> Request:
    """A request whose client stays until it has left."""

    async def receive() -> MutableMapping[str, Any]:
        await left.wait()
        return {"type": "http.disconnect"}

    return Request({"type": "http"}, receive)


@pytest.mark.parametrize("turns", range(6))
async def test_a_stream_is_sent_or_closed_whenever_the_deadline_passes(turns: int) -> None:
    stream = Stalled()
    to_send: list[Response] = []

    async def work() -> Response:
        await asyncio.sleep(0)
        after(turns, answering.cancel)
        return EventStream([stream], nothing())

    async def answer() -> None:
        to_send.append(await unless_disconnected(request(asyncio.Event()), work()))
        await asyncio.Event().wait()

    answering = asyncio.create_task(answer())
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(answering, DEADLINE_S)
    assert len(to_send) + stream.closed == 1


async def test_a_stream_that_was_made_although_its_client_had_gone_is_closed() -> None:
    left, stream = asyncio.Event(), Stalled()

    async def stubborn() -> Response:
        try:
            left.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass
        return EventStream([stream], nothing())

    async with asyncio.timeout(DEADLINE_S):
        response = await unless_disconnected(request(left), stubborn())
    assert response.status_code == CLIENT_CLOSED
    assert stream.closed == 1
