"""S19: request heads without end. Bytes and fields are counted while a head is incomplete, on every listener."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from semel.telemetry import Meter
from semel.web.server import ConnectionLimits, operator_routes
from tests.web.test_server import Served, error_of

WITHIN_S = 20
PIECE = 64 * 1024
BOMB = 8 * 1024**2
START = b"GET /health HTTP/1.1\r\nHost: a\r\n"
CHUNKED = b"POST /size HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n"


async def size(request: Request) -> Response:
    return Response(str(len(await request.body())))


@pytest.fixture
async def server() -> AsyncIterator[Served]:
    app = Starlette(routes=[*operator_routes(Meter(), str), Route("/size", size, methods=["POST"])])
    made = Served(app, ConnectionLimits())
    async with made.server.running():
        yield made


async def answer_to(port: int, pieces: Iterable[bytes], *, patience_s: float = WITHIN_S) -> tuple[bytes, int]:
    """What is answered while the pieces are sent, and how many bytes were sent before the server ended it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent = 0
    answer = asyncio.create_task(reader.read())
    async with asyncio.timeout(WITHIN_S):
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                if answer.done():
                    break
                writer.write(piece)
                await writer.drain()
                sent += len(piece)
        await asyncio.wait({answer}, timeout=patience_s)
        writer.close()
        try:
            return await answer, sent
        except ConnectionError:
            return b"", sent


def endless(line: bytes, *, total: int = BOMB) -> Iterable[bytes]:
    piece = line * (PIECE // len(line))
    return (piece for _ in range(total // len(piece)))


BOMBS = {
    "many short headers": (START, b"a:\r\n"),
    "one long value": (START + b"x: ", b"y"),
    "one long name": (START, b"z"),
    "a long path": (b"GET /", b"p"),
}


@pytest.mark.parametrize(("start", "line"), BOMBS.values(), ids=BOMBS)
async def test_a_head_without_end_is_refused_after_64_KiB(server: Served, start: bytes, line: bytes) -> None:
    _, sent = await answer_to(server.port, [start, *endless(line)])
    assert sent < BOMB / 2
    assert server.counted == ["request_head_too_large"]


async def test_a_head_that_is_a_little_too_large_is_answered_with_431(server: Served) -> None:
    for head in (b"x: " + bytes([121]) * 66_000 + b"\r\n", b"a: b\r\n" * 101):
        answer, _ = await answer_to(server.port, [START + head + b"\r\n"])
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert error_of(answer)["code"] == "request_head_too_large"
        assert "65,536 bytes or 100 fields" in error_of(answer)["message"]


async def test_trailers_without_end_are_given_up(server: Served) -> None:
    for line in (b"a:\r\n", b"z"):
        _, sent = await answer_to(server.port, [CHUNKED, *endless(line)])
        assert sent < BOMB / 2


async def test_large_heads_within_the_limit_and_large_bodies_are_served(server: Served) -> None:
    headers = b"".join(b"x-%d: %s\r\n" % (number, b"y" * 600) for number in range(95))
    answer, _ = await answer_to(server.port, [START + headers + b"Connection: close\r\n\r\n"])
    assert answer.startswith(b"HTTP/1.1 200 ")
    length = 4 * 1024**2
    start = b"POST /size HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % length
    answer, _ = await answer_to(server.port, [start, *endless(b"b", total=length)])
    assert answer.endswith(str(length).encode())
    chunk = b"10000\r\n" + b"c" * 65_536 + b"\r\n"
    start = CHUNKED.replace(b"3\r\nabc\r\n0\r\n", b"").replace(b"Host: a", b"Host: a\r\nConnection: close")
    answer, _ = await answer_to(server.port, [start, *[chunk] * 16, b"0\r\nA-Trailer: t\r\n\r\n"])
    assert answer.endswith(str(16 * 65_536).encode())
    assert server.counted == []


async def test_mutant_the_connection_of_uvicorn_takes_heads_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def naive(*_: object, place: object, **options: Any) -> HttpToolsProtocol:
        return HttpToolsProtocol(**options)

    monkeypatch.setattr("semel.web.server.Connection", naive)
    made = Served(Starlette(), ConnectionLimits())
    async with made.server.running():
        answer, sent = await answer_to(made.port, [START, *endless(b"a:\r\n", total=BOMB // 8)], patience_s=0.1)
    assert answer == b""
    assert sent >= BOMB // 8 - PIECE
