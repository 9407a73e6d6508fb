"""Clients that disconnect while they are answered: semel's server calls back, and with any other a task waits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from semel.web.disconnect import DISCONNECT, DisconnectWatch
from tests.waiting import until
from tests.web.test_server import Served, post, served

BODY = post(2) + b"{}"
LONG_BYTES = 200_000
"""More than what pauses reading."""


class Watching:
    """An application whose answers wait for `go`, in the scope of a watch."""

    def __init__(self, *, calls_back: bool = True) -> None:
        self.calls_back = calls_back
        self.go = asyncio.Event()
        self.begun = 0
        self.tasks: list[int] = []
        """Tasks that a watch begins."""

        self.left: list[bool] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self.calls_back:
            scope["extensions"].pop(DISCONNECT)
        await Request(scope, receive).body()
        before = len(asyncio.all_tasks())
        with DisconnectWatch(scope, receive) as watch:
            self.tasks.append(len(asyncio.all_tasks()) - before)
            self.begun += 1
            await self.go.wait()
        self.left.append(watch.has_left)
        await Response("ok")(scope, receive, send)


@asynccontextmanager
async def asked(made: Served, sent: bytes = BODY) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
    writer.write(sent)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


@pytest.mark.parametrize("calls_back", [True, False])
async def test_a_client_that_leaves_ends_the_wait_and_one_that_stays_is_answered(calls_back: bool) -> None:
    app = Watching(calls_back=calls_back)
    async with served(app) as made:
        async with asked(made):
            await until(lambda: app.begun == 1)
        await until(lambda: app.left == [True])
        async with asked(made) as (reader, _):
            await until(lambda: app.begun == 2)
            app.go.set()
            assert b" 200 " in await reader.readline()
    assert app.left == [True, False]
    assert app.tasks == ([0, 0] if calls_back else [1, 1]), "none, where the server calls back"


async def test_the_request_under_way_hears_of_it_though_another_was_sent_ahead() -> None:
    app = Watching()
    async with served(app) as made:
        async with asked(made, 2 * BODY):
            await until(lambda: app.begun == 1)
        await until(lambda: app.left == [True])


async def test_a_stream_that_a_client_leaves_is_no_error_though_another_request_was_sent_ahead(
    caplog: pytest.LogCaptureFixture,
) -> None:
    streams = [asyncio.Event(), asyncio.Event()]
    left: list[bool] = []

    async def streaming(scope: Scope, receive: Receive, send: Send) -> None:
        await Request(scope, receive).body()
        with DisconnectWatch(scope, receive) as watch:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"one", "more_body": True})
            await streams[len(left)].wait()
        if not watch.has_left:
            await send({"type": "http.response.body", "body": b""})
        left.append(watch.has_left)

    async with served(streaming) as made:
        async with asked(made, 3 * BODY) as (reader, _):
            await reader.readuntil(b"one")
            streams[0].set()
            await reader.readuntil(b"one")
        await until(lambda: left == [False, True])
        await until(lambda: not made.server._server.server_state.tasks)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("calls_back", [True, False])
async def test_a_client_that_leaves_after_a_long_body_is_noticed(calls_back: bool) -> None:
    """The rest of the body comes at once, while the application waits for it: that pauses reading."""
    app, asks = Watching(calls_back=calls_back), asyncio.Event()

    async def reading(scope: Scope, receive: Receive, send: Send) -> None:
        async def receiving() -> Message:
            asks.set()
            return await receive()

        await app(scope, receiving, send)

    async with served(reading) as made:
        async with asked(made, post(LONG_BYTES)) as (_, writer):
            await asks.wait()
            writer.write(bytes(LONG_BYTES))
            await until(lambda: app.begun == 1)
        await until(lambda: app.left == [True])


async def test_a_client_that_leaves_is_noticed_though_its_next_request_came_before_the_watch() -> None:
    app, read, go = Watching(), asyncio.Event(), asyncio.Event()

    async def late(scope: Scope, receive: Receive, send: Send) -> None:
        body = await Request(scope, receive).body()
        read.set()
        await go.wait()
        messages = iter([{"type": "http.request", "body": body}])

        async def again() -> Message:
            return next(messages)

        await app(scope, again, send)

    async with served(late) as made:
        async with asked(made) as (_, writer):
            await read.wait()
            writer.write(BODY)
            (connection,) = made.server._server.server_state.connections
            await until(lambda: len(connection.pipeline) == 1)  # type: ignore[union-attr]
            go.set()
            await until(lambda: app.begun == 1)
        await until(lambda: app.left == [True])


async def test_a_client_that_has_left_before_the_watch_begins_is_noticed() -> None:
    app, gone = Watching(), asyncio.Event()

    async def late(scope: Scope, receive: Receive, send: Send) -> None:
        scope["extensions"][DISCONNECT]["watch"](gone.set)
        await gone.wait()
        await app(scope, read, send)

    async def read() -> dict[str, object]:
        return {"type": "http.request", "body": b"{}"}

    async with served(late) as made:
        async with asked(made):
            pass
        await until(lambda: app.left == [True])


async def test_a_cancellation_from_elsewhere_goes_on_though_the_client_leaves_too() -> None:
    calls: list[Callable[[], None]] = []
    scope = {"type": "http", "extensions": {DISCONNECT: {"watch": calls.append}}}

    async def receive() -> dict[str, object]:
        raise NotImplementedError

    async def work() -> bool:
        with DisconnectWatch(scope, receive) as watch:
            await asyncio.Event().wait()
        return watch.has_left

    left, cancelled = asyncio.create_task(work()), asyncio.create_task(work())
    await asyncio.sleep(0)
    for call in calls:
        call()
    cancelled.cancel()
    assert await left
    assert not left.cancelling()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
