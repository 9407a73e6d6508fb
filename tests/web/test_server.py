"""The deadlines of connections over real sockets (S18), each beside what uvicorn does by itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from semel.web.server import ConnectionLimits, HttpServer
from tests.waiting import until

WITHIN_S = 20.0
LONG_S = 60.0


class App:
    """Answers with megabytes to who asks for them, and else when it is let."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.let = asyncio.Event()
        self.ended = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked.set()
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            if scope["path"] == "/much":
                leaving = asyncio.create_task(left(receive))
                while not leaving.done():
                    await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
                    await asyncio.sleep(0)
                return
            await self.let.wait()
            await send({"type": "http.response.body", "body": b"ok"})
        finally:
            self.ended.set()


class Hasty:
    """Answers at once, whatever is still to come of a request; with these headers."""

    def __init__(self, *headers: tuple[bytes, bytes]) -> None:
        self.headers = headers
        self.answered = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        self.answered += 1
        headers = [(b"content-length", b"2"), *self.headers]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": b"no"})


async def left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Served:
    """A server on a port of its own, and what it has counted."""

    def __init__(self, app: ASGIApp, limits: ConnectionLimits) -> None:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            self.port = int(bound.getsockname()[1])
        self.counted: list[str] = []
        self.server = HttpServer(app, "127.0.0.1", self.port, limits, self.counted.append)


@contextlib.asynccontextmanager
async def served(app: ASGIApp, **limits: float) -> AsyncIterator[Served]:
    given: dict[str, Any] = {"idle_s": LONG_S, "headers_s": LONG_S, "stall_s": LONG_S} | limits
    made = Served(app, ConnectionLimits(**given))
    async with made.server.running():
        yield made


async def asking(port: int, data: bytes, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has sent this before it is accepted: in time, however busy the machine is."""
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(data)
    return await asyncio.open_connection(sock=connection, **options)


async def all_of(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(WITHIN_S):
        return await reader.read()


def post(nbytes: int, *headers: str) -> bytes:
    """The head of a request with a body of so many bytes."""
    lines = ["POST / HTTP/1.1", "Host: a", f"Content-Length: {nbytes}", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


def error_of(answer: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    return error


async def test_headers_that_trickle_in_are_given_up_S18() -> None:
    async with served(App(), headers_s=0.1) as made:
        reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nX-Slow: ")
        answer = await all_of(reader)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in answer.lower()
    assert error_of(answer)["code"] == "request_timeout"
    assert "--max-body-s" in error_of(answer)["message"]
    assert made.counted == ["request_timeout"]


async def test_a_naive_server_waits_for_headers_for_ever_S18() -> None:
    """The control: uvicorn's own connection, whose only deadline is that between two requests."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        server = uvicorn.Server(uvicorn.Config(App(), timeout_keep_alive=0, log_config=None, lifespan="off"))
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        await until(lambda: server.started)
        reader, writer = await asyncio.open_connection(*bound.getsockname())
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nX-Slow: ")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(), 0.5)
        writer.close()
        server.should_exit = True
        await serving


async def test_one_that_has_asked_and_waits_is_not() -> None:
    app = App()
    async with served(app, idle_s=0.1, headers_s=0.1) as made:
        reader, writer = await asking(made.port, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        await asyncio.wait_for(app.asked.wait(), WITHIN_S)
        await asyncio.sleep(0.3)
        app.let.set()
        async with asyncio.timeout(WITHIN_S):
            assert (await reader.readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_a_client_that_does_not_read_is_given_up_and_the_application_hears_of_it_S18() -> None:
    app = App()
    async with served(app, stall_s=0.2) as made:
        _, writer = await asyncio.open_connection("127.0.0.1", made.port, limit=1)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET /much HTTP/1.1\r\nHost: a\r\n\r\n")
        async with asyncio.timeout(WITHIN_S):
            await app.ended.wait()
        writer.transport.abort()
    assert made.counted == ["client_stalled"]


async def test_what_is_no_http_is_refused_in_openai_s_shape() -> None:
    async with served(App()) as made:
        reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
        writer.write(b"\x16\x03\x01 what?\r\n\r\n")
        answer = await all_of(reader)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert error_of(answer)["code"] == "invalid_request"


async def test_after_release_answers_under_way_end_their_connections_and_others_are_still_served() -> None:
    app = App()
    async with served(app) as made:
        reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        await asyncio.wait_for(app.asked.wait(), WITHIN_S)
        made.server.release()
        other_reader, other = await asyncio.open_connection("127.0.0.1", made.port)
        other.write(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        app.let.set()
        assert (await all_of(reader)).endswith(b"ok\r\n0\r\n\r\n")
        assert (await all_of(other_reader)).endswith(b"ok\r\n0\r\n\r\n")
        for one in (writer, other):
            one.close()


@pytest.mark.parametrize("released", [True, False])
async def test_after_release_a_connection_that_was_idle_ends_with_its_next_answer(released: bool) -> None:
    """Control: without release it stays open, and a balancer that keeps it would send on to a process that ends."""
    app = App()
    app.let.set()
    async with served(app) as made:
        reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
        for last in (False, True):
            if last and released:
                made.server.release()
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            async with asyncio.timeout(WITHIN_S):
                answer = await reader.readuntil(b"ok\r\n0\r\n\r\n")
            assert (b"connection: close" in answer) == (last and released)
        if released:
            assert await all_of(reader) == b""
        writer.close()


UPGRADE = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: x", "Sec-WebSocket-Version: 13")


@pytest.mark.parametrize(
    ("sent", "later"),
    [
        (b"\r\n", b""),
        (post(10), b"1"),
        (post(10), b"1234567890"),
        (post(10), b"1234567890\r\n"),
        (post(10, *UPGRADE), b""),
    ],
    ids=["blank line", "part of a body", "all of a body", "and a blank line", "upgrade with a body"],
)
async def test_bytes_that_begin_no_request_keep_no_connection_open_S18(sent: bytes, later: bytes) -> None:
    async with served(Hasty(), idle_s=0.3, headers_s=0.3) as made:
        reader, writer = await asking(made.port, sent)
        if later:
            async with asyncio.timeout(WITHIN_S):
                await reader.readuntil(b"no")
            writer.write(later)
        await all_of(reader)
        writer.close()
    assert made.counted == []


async def test_nor_do_they_if_they_keep_coming_S18() -> None:
    async with served(Hasty(), idle_s=0.3) as made:
        reader, writer = await asking(made.port, post(1_000_000))
        reading = asyncio.create_task(reader.read())
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(WITHIN_S):
                while not reading.done():
                    writer.write(b"1")
                    await asyncio.sleep(0.02)
                await reading
        writer.close()


async def test_headers_that_began_before_the_last_answer_was_over_have_their_own_time() -> None:
    app = App()
    async with served(app, idle_s=0.2) as made:
        reader, writer = await asking(made.port, b"GET / HTTP/1.1\r\nHost: a\r\n\r\nGET / HTTP/1.1\r\nHos")
        await asyncio.wait_for(app.asked.wait(), WITHIN_S)
        app.let.set()
        async with asyncio.timeout(WITHIN_S):
            await reader.readuntil(b"0\r\n\r\n")
            await asyncio.sleep(0.5)
            writer.write(b"t: a\r\n\r\n")
            await reader.readuntil(b"0\r\n\r\n")
        writer.close()


CLOSE = (b"connection", b"close")


@pytest.mark.parametrize("close", ["", "client", "server", "old client"])
async def test_an_answer_that_comes_before_its_request_has_can_be_read(close: str) -> None:
    head = post(8 << 20, "Connection: close") if close == "client" else post(8 << 20)
    if close == "old client":
        head = head.replace(b"HTTP/1.1", b"HTTP/1.0")
    async with served(Hasty(*[CLOSE] * (close == "server"))) as made:
        reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
        writer.write(head)
        async with asyncio.timeout(WITHIN_S):
            for _ in range(128):
                writer.write(bytes(1 << 16))
                await writer.drain()
            answer = await reader.readuntil(b"\r\n\r\nno")
            assert answer.startswith(b"HTTP/1.1 413 ")
            assert (b"connection: close" in answer) == bool(close)
            if close:
                assert await reader.read() == b""
        writer.close()


async def test_what_follows_a_request_that_is_the_last_is_not_answered() -> None:
    app = Hasty(CLOSE)
    async with served(app) as made:
        reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
        writer.write(post(10))
        async with asyncio.timeout(WITHIN_S):
            await reader.readuntil(b"no")
        writer.write(b"1234567890" + post(0))
        assert await all_of(reader) == b""
        writer.close()
    assert app.answered == 1


async def test_there_is_an_end_to_what_is_thrown_away_of_a_request_S18() -> None:
    async with served(Hasty(), unread_bytes=1 << 20) as made:
        reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
        writer.write(post(1 << 30))
        async with asyncio.timeout(WITHIN_S):
            await reader.readuntil(b"no")
            with pytest.raises(ConnectionError):
                for _ in range(1_024):
                    writer.write(bytes(1 << 16))
                    await writer.drain()
        writer.close()


async def test_a_client_that_never_reads_the_end_of_its_last_answer_is_given_up_too_S18() -> None:
    made: Served

    async def filling(scope: Scope, receive: Receive, send: Send) -> None:
        """Until the system takes no more, and the server has a little left to send."""
        (connection,) = made.server._server.server_state.connections
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not connection.transport.get_write_buffer_size():
            await send({"type": "http.response.body", "body": bytes(1 << 10), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async with served(filling, idle_s=0.1, stall_s=0.2) as made:
        _, writer = await asking(made.port, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", limit=1)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: made.counted == ["client_stalled"], within_s=WITHIN_S)
        writer.transport.abort()


async def pipelined(made: Served, app: App, count: int) -> int:
    """How many requests of one connection wait at once, if so many are sent before any is answered."""
    _, writer = await asyncio.open_connection("127.0.0.1", made.port)
    request = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
    writer.write(request)
    await until(lambda: len(made.server._server.server_state.connections) == 1)
    (connection,) = made.server._server.server_state.connections
    waiting = connection.pipeline  # type: ignore[union-attr]
    writer.write(request * (count - 1))
    with contextlib.suppress(TimeoutError):
        await until(lambda: bool(made.counted) or len(waiting) >= count - 1, within_s=WITHIN_S)
    found = len(waiting)
    writer.transport.abort()
    app.let.set()
    return found


async def test_requests_that_are_sent_ahead_are_bounded_S25() -> None:
    async with served(app := App()) as made:
        assert await pipelined(made, app, 2_000) == ConnectionLimits().pipelined
    assert made.counted[:1] == ["invalid_request"]


async def test_mutant_without_that_bound_all_of_them_wait_in_memory_S25() -> None:
    async with served(app := App(), pipelined=10_000) as made:
        assert await pipelined(made, app, 2_000) == 1_999


async def test_a_server_that_can_accept_nothing_ends_and_says_why_S25(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("nothing is accepted")

    monkeypatch.setattr("semel.web.listener.Listener.accept", fail)
    made = Served(App(), ConnectionLimits())
    with pytest.raises(RuntimeError, match="nothing is accepted"):
        await asyncio.wait_for(made.server.serve(), WITHIN_S)


async def test_a_connection_that_says_nothing_is_closed_after_the_shorter_patience_and_counted_S25() -> None:
    async with served(App(), first_s=0.1) as made:
        reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
        assert await all_of(reader) == b""
        writer.close()
        assert made.server._admission.closed == {"late": 1}


async def test_after_a_response_a_connection_may_be_idle_for_longer_S25() -> None:
    app = App()
    app.let.set()
    request = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
    async with served(app, first_s=0.1) as made:
        reader, writer = await asking(made.port, request)
        for _ in range(2):
            async with asyncio.timeout(WITHIN_S):
                await reader.readuntil(b"0\r\n\r\n")
            await asyncio.sleep(0.3)  # longer than the patience before a first request
            writer.write(request)
        async with asyncio.timeout(WITHIN_S):
            await reader.readuntil(b"0\r\n\r\n")
        writer.close()
        assert not made.server._admission.closed


async def test_an_address_has_a_limit_of_its_own_and_another_one_is_served_beside_it_S25() -> None:
    async with served(app := App(), max_address_connections=2) as made:
        connections = [await asyncio.open_connection("127.0.0.1", made.port) for _ in range(2)]
        for _, writer in connections:
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        await until(lambda: dict(made.server._admission.by_stage())["busy"] == 2)
        reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert error_of(await all_of(reader))["code"] == "too_many_connections"
        writer.close()
        assert made.counted == ["too_many_connections"]
        other, writer = await asyncio.open_connection("127.0.0.1", made.port, local_addr=("127.0.0.2", 0))
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        async with asyncio.timeout(WITHIN_S):
            assert b" 200 " in await other.readline()
        for _, one in (*connections, (other, writer)):
            one.transport.abort()
        app.let.set()
