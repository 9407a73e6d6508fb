"""The table of faults counts what its clients see: a server that fails in each way shows in the right column."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tools.fleet.faults import Seen, Traffic

OK = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
TOKEN = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
ERROR = b'data: {"error": {"code": "worker_lost"}}\n\n'
DONE = b"data: [DONE]\n\n"


async def seen_from(answer: bytes, is_stopped: Callable[[Seen], bool]) -> Seen:
    """What is counted of good requests to a server that always answers so, and closes the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    world: Any = SimpleNamespace(fleet=SimpleNamespace(urls=[f"http://127.0.0.1:{port}"]), file_id="file-1")
    seen, end = Seen(), asyncio.Event()
    async with server, asyncio.timeout(60):
        traffic = asyncio.create_task(Traffic(world, seen, per_s=100.0).run(end))
        while not is_stopped(seen):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        end.set()
        await traffic
    return seen


def many(seen: Seen) -> bool:
    return seen.good + len(seen.before) + len(seen.in_stream) >= 10


@pytest.mark.parametrize(
    ("answer", "column"),
    [
        (OK + TOKEN + DONE, "good"),
        (b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\n\r\nno", "before"),
        (b"", "before"),
    ],
)
async def test_what_fails_before_the_first_byte_is_counted_as_that(answer: bytes, column: str) -> None:
    seen = await seen_from(answer, many)
    counts = {"good": seen.good, "before": len(seen.before), "in_stream": len(seen.in_stream)}
    assert {name for name, count in counts.items() if count} == {column}
    assert (seen.again > 0) is (answer == b"")


@pytest.mark.parametrize("answer", [OK + TOKEN, OK + TOKEN + ERROR])
async def test_a_stream_without_its_end_is_counted_as_failed_in_stream(answer: bytes) -> None:
    seen = await seen_from(answer, lambda seen: len(seen.in_stream) >= 2)
    assert not seen.before


async def test_an_error_instead_of_the_first_token_is_a_failure_before_the_first_byte() -> None:
    seen = await seen_from(OK + ERROR, lambda seen: len(seen.before) >= 2)
    assert not seen.in_stream
