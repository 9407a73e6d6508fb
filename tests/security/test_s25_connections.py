"""S25: connections that only wait. Probes are answered however many there are; the rest is refused and counted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from semel.lab.bench.ports import free_port
from semel.web.listener import RESERVE
from tests.embeddings.certificates import Authority
from tests.serve.served import sum_of

logger = logging.getLogger(__name__)

FILES, IDLE = 600, 900
LIMIT = FILES - 256
PROBES = ("/health", "/ready", "/metrics")
WITHIN_S = 20.0
CONTROL_S = 2.0


@contextlib.asynccontextmanager
async def server(kind: str = "shipped", authority: Authority | None = None) -> AsyncIterator[int]:
    """`tests.web.limited` at a port."""
    port = free_port()
    pems = [] if authority is None else [str(authority.certificate), str(authority.private_key)]
    command = [sys.executable, "-m", "tests.web.limited", str(port), str(FILES), kind, *pems]
    process = subprocess.Popen(command)  # noqa: ASYNC220 it is not waited for
    try:
        async with asyncio.timeout(60):
            while not await listens(port):
                assert process.poll() is None
                await asyncio.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.wait()


async def listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.transport.abort()
    return True


async def ask(port: int, path: str, within_s: float = WITHIN_S, *, tls: ssl.SSLContext | None = None) -> bytes:
    """The whole answer on a connection of its own; empty if none comes in time, or the connection is reset."""
    writer = None
    try:
        async with asyncio.timeout(within_s):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=tls, server_hostname="localhost" if tls else None
            )
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            return await reader.read()
    except (OSError, TimeoutError):
        return b""
    finally:
        if writer is not None:
            writer.transport.abort()


@contextlib.contextmanager
def many_files() -> Iterator[None]:
    """Let this process have as many open files as the attack needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8_192) if hard > 0 else 8_192, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.asynccontextmanager
async def connected(port: int, count: int, sent: bytes = b"") -> AsyncIterator[list[socket.socket]]:
    """So many connections that have sent this, and nothing after it."""
    loop = asyncio.get_running_loop()
    with many_files(), contextlib.ExitStack() as stack:
        made = []
        for _ in range(count):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            async with asyncio.timeout(WITHIN_S):
                await loop.sock_connect(one, ("127.0.0.1", port))
                await loop.sock_sendall(one, sent)
            made.append(one)
        yield made


async def check_probes(port: int, within_s: float = WITHIN_S, *, tls: ssl.SSLContext | None = None) -> None:
    """Each is answered at once on a machine that does nothing else; the limit here is for one that is busy."""
    for path in PROBES:
        began = time.monotonic()
        answer = await ask(port, path, within_s, tls=tls)
        assert answer.startswith(b"HTTP/1.1 200 "), f"{path}: {answer[:80]!r}"
        logger.info("%s was answered in %.0f ms", path, 1_000 * (time.monotonic() - began))


async def metrics(port: int, *, tls: ssl.SSLContext | None = None) -> str:
    return (await ask(port, "/metrics", tls=tls)).decode()


async def test_900_idle_connections_at_600_descriptors_leave_the_probes_and_new_clients_alone() -> None:
    async with server() as port, connected(port, IDLE):
        await check_probes(port)
        assert (await ask(port, "/hello")).endswith(b"hello")
        counted = await metrics(port)
        assert sum_of(counted, "semel_connections_limit") == LIMIT
        assert (
            sum_of(counted, "semel_connections", 'state="silent"') + sum_of(counted, "semel_connections", "busy")
            <= LIMIT
        )
        assert sum_of(counted, "semel_connections_closed_total", 'reason="silent"') >= IDLE - LIMIT


async def test_while_all_are_being_answered_probes_are_too_and_the_rest_gets_503_and_is_counted() -> None:
    waiting = b"GET /wait HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with server() as port, connected(port, IDLE, waiting):
        await check_probes(port)
        answer = await ask(port, "/hello")
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nRetry-After: 1\r\n" in answer
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
        counted = await metrics(port)
        assert sum_of(counted, "semel_connections", 'state="busy"') == LIMIT
        assert sum_of(counted, "semel_connections", 'state="reserved"') <= RESERVE
        assert sum_of(counted, "semel_connections_closed_total", 'reason="full"') >= IDLE - LIMIT


async def test_connections_that_never_begin_their_tls_handshake_count_too(tmp_path: Path) -> None:
    """An event loop tells of a connection with TLS only when the handshake is over."""
    authority = Authority.create(tmp_path)
    tls = authority.client_context()
    async with server(authority=authority) as port, connected(port, IDLE):
        await check_probes(port, tls=tls)
        counted = await metrics(port, tls=tls)
        assert sum_of(counted, "semel_connections_closed_total", 'reason="silent"') >= IDLE - LIMIT


async def test_control_a_server_without_the_limit_does_not_answer_its_probes() -> None:
    async with server("naive") as port, connected(port, IDLE):
        with pytest.raises(AssertionError, match="/health"):
            await check_probes(port, CONTROL_S)
