"""What counts as lost and as wrong: servers break connections, answer wrongly, and answer what is to be refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from semel.lab.prove.answers import Answer, References
from semel.lab.prove.driver import Balancer, Driver, Tally
from semel.lab.prove.page import checks_of
from semel.lab.prove.plan import TENANTS, Ask, Kind, Media, Question
from semel.lab.prove.relay import relaying
from semel.lab.prove.work import Work
from tests.waiting import until

QUESTION = Question("what?")
ASK = Ask(0, "alice", QUESTION)
RIGHT = '{"choices": [{"index": 0, "token_ids": [1, 2], "message": {"content": " 1 2"}}]}'
WRONG = RIGHT.replace("2]", "3]").replace(" 2", " 3")
BEGUN = 'data: {"choices": [{"index": 0, "token_ids": [1], "delta": {"content": " 1"}}]}\n\n'
REST = 'data: {"choices": [{"index": 0, "token_ids": [2], "delta": {"content": " 2"}}]}\n\ndata: [DONE]\n\n'
LOST = 'data: {"error": {"code": "worker_lost"}}\n\n'

Reply = Callable[[int], tuple[int, str, bool]]
"""Status, body and whether the body is cut off, for the n-th request; status 0 resets the connection."""


@asynccontextmanager
async def replying(reply: Reply) -> AsyncIterator[list[str]]:
    """Two servers that reply so; their addresses."""
    count = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/ready" in head:
            status, body, is_cut = 200, "{}", False
        else:
            status, body, is_cut = reply(count)
            count += 1
        if status:
            length = len(body) + is_cut * 10
            writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}".encode())
            await writer.drain()
        writer.close()

    async with AsyncExitStack() as stack:
        urls = []
        for _ in range(2):
            server = await asyncio.start_server(answer, "127.0.0.1", 0)
            stack.callback(server.close)
            urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        yield urls


async def tally_of(reply: Reply, ask: Ask = ASK) -> Tally:
    references = References({QUESTION.key: Answer({0: " 1 2"}, {0: [1, 2]})})
    async with replying(reply) as urls, asyncio.timeout(20):
        keys = dict.fromkeys(TENANTS, "key")
        return await Driver(Balancer(lambda: urls), references, Media([b""]), keys, at_a_time=1).run([ask])


STREAMED = replace(ASK, kind=Kind.STREAMED)
REFUSED = replace(ASK, kind=Kind.REFUSED, refusal="no messages")


@pytest.mark.parametrize(
    ("ask", "replies", "outcome"),
    [
        (ASK, [(200, RIGHT, False)], "answered"),
        (ASK, [(0, "", False), (200, RIGHT, False)], "answered"),
        (ASK, [(200, RIGHT[:9], True), (200, RIGHT, False)], "answered"),
        (ASK, [(0, "", False), (0, "", False)], "failed"),
        (ASK, [(503, "no worker", False)], "failed"),
        (ASK, [(200, WRONG, False)], "different"),
        (STREAMED, [(200, BEGUN + REST, False)], "streamed"),
        (STREAMED, [(200, BEGUN, True)], "stream ended"),
        (STREAMED, [(200, BEGUN + LOST, False)], "stream ended"),
        (STREAMED, [(200, "", True), (200, BEGUN + REST, False)], "streamed"),
        (STREAMED, [(200, LOST, False)], "failed"),
        (STREAMED, [(200, BEGUN.replace("1", "5"), True)], "different"),
        (REFUSED, [(400, "{}", False)], "refused"),
        (REFUSED, [(200, RIGHT, False)], "admitted"),
        (REFUSED, [(500, "{}", False)], "failed"),
    ],
)
async def test_an_answer_is_judged_and_a_reset_is_sent_again_once(
    ask: Ask, replies: list[tuple[int, str, bool]], outcome: str
) -> None:
    tally = await tally_of(lambda number: replies[number], ask)
    assert dict(tally.outcomes) == {outcome: 1}
    assert tally.sent_again == len(replies) - 1
    is_wrong = outcome in ("failed", "different", "admitted")
    assert bool(tally.faults) == is_wrong
    assert all(check.ok for check in checks_of(tally, Work())) != is_wrong


async def ended(reader: asyncio.StreamReader) -> bool:
    try:
        return not await reader.read(1)
    except ConnectionError:
        return True


async def test_a_link_that_is_cut_ends_and_can_be_used_again() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(9):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    target = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, asyncio.timeout(20), relaying(target) as relay:
        port = int(relay.address.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one"
        cutting = asyncio.create_task(relay.cut(0.2))
        assert await ended(reader)
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await ended(reader)
        writer.close()
        await cutting
        await until(lambda: not relay.is_cut)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"two")
        assert await reader.readexactly(3) == b"two"
        writer.close()
