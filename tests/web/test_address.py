"""The socket of a server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest

from semel.web.listener import bind


def bound_without_a_protocol(host: str, port: int) -> socket.socket:
    """The mutant: `bind` as it was."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.bind((host, port))
    return bound


async def sends_at_once(bound: socket.socket) -> bool:
    """Whether asyncio sends small pieces without waiting for the client to confirm the one before."""
    answers: asyncio.Queue[bool] = asyncio.Queue()

    def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted = writer.get_extra_info("socket")
        answers.put_nowait(bool(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
        writer.close()

    async with await asyncio.start_server(accept, sock=bound), asyncio.timeout(20):
        _, client = await asyncio.open_connection(*bound.getsockname())
        try:
            return await answers.get()
        finally:
            client.close()


@pytest.mark.parametrize(("bound_by", "expected"), [(bind, True), (bound_without_a_protocol, False)])
async def test_small_pieces_are_sent_at_once(bound_by: Callable[[str, int], socket.socket], expected: bool) -> None:
    """Found: an answer's body came 40 ms after its headers, with asyncio's loop (`semel` itself runs on uvloop)."""
    assert await sends_at_once(bound_by("127.0.0.1", 0)) is expected
