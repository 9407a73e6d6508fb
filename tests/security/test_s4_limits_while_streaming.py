"""S4: a server decides neither how many bytes we take nor how long we wait."""

from __future__ import annotations

import asyncio
import gzip
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from semel.errors import MediaTooLarge, MediaUnavailable
from tests.media.origin import LIMITS, Answer, Origin, Seen, fetcher, get, head, origin, reaching, reply
from tests.security.naive import naive_fetch

PIECE = b"x" * 4_096
PIECES = 1_024


@pytest.fixture
async def server() -> AsyncIterator[Origin]:
    async with origin() as made:
        yield made


class Flood:
    """Sends 64 times what is allowed, unless it is stopped, and counts what it got rid of."""

    def __init__(self, start: bytes, *, chunked: bool) -> None:
        self._start = start
        self._piece = b"%x\r\n%s\r\n" % (len(PIECE), PIECE) if chunked else PIECE
        self._end = b"0\r\n\r\n" if chunked else b""
        self.sent = 0

    async def __call__(self, _: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(self._start)
        for _number in range(PIECES):
            writer.write(self._piece)
            await writer.drain()
            self.sent += len(PIECE)
        writer.write(self._end)
        await writer.drain()
        writer.close()


FLOODS = {
    "with its true length": (head(content_length=str(PIECES * len(PIECE))), False),
    "without a length": (head(connection="close"), False),
    "in chunks": (head(transfer_encoding="chunked"), True),
}


@pytest.mark.parametrize("name", FLOODS)
async def test_bytes_are_counted_as_they_come_and_no_more_is_taken_than_allowed(server: Origin, name: str) -> None:
    start, chunked = FLOODS[name]
    server["/a"] = Flood(start, chunked=chunked)
    assert len(await naive_fetch(server.url("/a"))) == PIECES * len(PIECE)  # the control takes all of it

    server["/a"] = flood = Flood(start, chunked=chunked)
    kept: list[int] = []
    async with reaching(server) as fetching:
        with pytest.raises(MediaTooLarge, match="over 65,536 bytes; raise the limit with --max-media-bytes"):
            await get(fetching, server.url("/a"), spend=kept.append)
    await server.until(lambda: server.connections == 0)
    assert sum(kept) <= LIMITS.max_bytes
    assert flood.sent < PIECES * len(PIECE)


async def test_a_length_that_is_over_the_limit_is_believed_at_once(server: Origin) -> None:
    never = asyncio.Event()

    async def announce(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(head(content_length=str(10**15)))
        await writer.drain()
        await never.wait()

    server["/a"] = announce
    async with reaching(server) as fetching:
        with pytest.raises(MediaTooLarge):
            await get(fetching, server.url("/a"))


def raw(data: bytes) -> Answer:
    async def answer(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        writer.close()

    return answer


@pytest.mark.parametrize(
    "data",
    [
        head(content_length="10") + b"short",
        head(content_length="-5") + b"x",
        head(content_length="5x") + b"xxxxx",
        head(content_length="1", transfer_encoding="chunked") + b"5\r\nhello\r\n0\r\n\r\n",
        head(transfer_encoding="chunked") + b"5\r\nhel",
        head(transfer_encoding="chunked") + b"zz\r\nhello\r\n0\r\n\r\n",
        head(transfer_encoding="chunked") + b"ffffffffffffffffff\r\nhello",
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 100_000 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nA: " + b"b" * 1_000_000 + b"\r\n\r\n",
        b"not http at all\r\n\r\n",
        b"",
    ],
)
async def test_an_answer_that_contradicts_itself_is_no_media(server: Origin, data: bytes) -> None:
    server["/a"] = raw(data)
    async with reaching(server) as fetching:
        with pytest.raises(MediaUnavailable, match="broke off"):
            await get(fetching, server.url("/a"))


async def test_what_follows_the_announced_length_is_neither_kept_nor_taken_for_the_next_answer(server: Origin) -> None:
    server["/a"] = raw(head(content_length="5") + b"hello" + head(content_length="4") + b"evil")
    server["/b"] = b"good"
    async with reaching(server) as fetching:
        assert await get(fetching, server.url("/a")) == b"hello"
        assert await get(fetching, server.url("/b")) == b"good"


async def test_a_compressed_bomb_is_not_unpacked(server: Origin) -> None:
    server["/a"] = reply(gzip.compress(bytes(10 << 20)), content_encoding="gzip")
    assert len(await naive_fetch(server.url("/a"))) == 10 << 20
    async with reaching(server) as fetching:
        with pytest.raises(MediaUnavailable, match="compresses"):
            await get(fetching, server.url("/a"))


def drip(start: bytes, piece: bytes) -> Answer:
    async def answer(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(start)
        while True:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)

    return answer


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (head(content_length="50000"), b"x"),
        (head(transfer_encoding="chunked"), b"1\r\nx\r\n"),
        (b"HTTP/1.1 200 OK\r\n", b"A: b\r\n"),
        (b"", b"H"),
    ],
)
async def test_a_server_that_drips_is_left_when_the_time_for_all_of_it_is_over(
    server: Origin, start: bytes, piece: bytes
) -> None:
    """It is never idle: only a limit on the whole ends it."""
    server["/a"] = drip(start, piece)
    async with reaching(server, limits=replace(LIMITS, total_s=0.3, idle_s=0.2)) as fetching:
        begin = time.monotonic()
        with pytest.raises(MediaUnavailable, match=r"took too long|broke off"):
            await get(fetching, server.url("/a"))
        assert time.monotonic() - begin < 5.0
    await server.until(lambda: server.connections == 0)


@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 200", head(content_length="100") + b"half"])
async def test_a_server_that_falls_silent_is_left(server: Origin, start: bytes) -> None:
    never = asyncio.Event()

    async def answer(_: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(start)
        await writer.drain()
        await never.wait()

    server["/a"] = answer
    async with reaching(server, limits=replace(LIMITS, idle_s=0.2)) as fetching:
        begin = time.monotonic()
        with pytest.raises(MediaUnavailable, match="took too long"):
            await get(fetching, server.url("/a"))
        assert time.monotonic() - begin < 5.0


async def test_a_server_that_never_takes_a_connection_is_left() -> None:
    """A listener whose queue is full drops what comes: the connection is never made."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        full = [socket.socket() for _ in range(4)]
        for one in full:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
        try:
            async with reaching(Origin("127.0.0.1", port), limits=replace(LIMITS, connect_s=0.2)) as fetching:
                begin = time.monotonic()
                with pytest.raises(MediaUnavailable, match="took too long"):
                    await get(fetching, f"http://127.0.0.1:{port}/")
                assert time.monotonic() - begin < 5.0
        finally:
            for one in full:
                one.close()


async def test_a_name_server_that_never_answers_is_left() -> None:
    never = asyncio.Event()

    async def wait(_: str) -> list[str]:
        await never.wait()
        return []

    async with fetcher("cat.example", lookup=wait, limits=replace(LIMITS, total_s=0.2)) as fetching:
        with pytest.raises(MediaUnavailable, match="took too long"):
            await get(fetching, "https://cat.example/")
        never.set()
