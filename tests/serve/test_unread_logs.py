"""S28, for a minute: `semel serve` whose log goes nowhere answers all the while, and counts what it dropped.

Standard error is a pipe that nobody reads, or a full disk; or the supervisor, which reads what its processes print, is
stopped. A tenant asks for its models as fast as it can, so that the log is larger than all queues.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from semel.lab.bench.ports import free_port
from tests.conftest import Folder
from tests.security.test_s28_logs import F_SETPIPE_SZ, full_disk
from tests.serve.served import sum_of
from tests.serve.test_killed import started

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.nightly, pytest.mark.timeout(420)]

KEY = "a-key-of-a-tenant"
SECONDS = 60.0
MAX_GAP_S = 1.0
CHATS_PER_S = 5
STRANGERS_PER_S = 20
FILLERS = 4
LONG_ID = "x" * 128
"""A client's own id of a request, which stands in its line."""


@dataclass
class Seen:
    """What clients saw."""

    chats: Counter[object] = field(default_factory=Counter)
    strangers: Counter[object] = field(default_factory=Counter)
    lines: int = 0
    longest_gap_s: float = 0.0


def unread_pipe() -> tuple[int, int]:
    """A pipe that is full before the start is over."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, F_SETPIPE_SZ, 4_096)
    return reader, writer


def read() -> tuple[int, int]:
    """A log that can be written."""
    return os.open("/dev/null", os.O_RDONLY), os.open("/dev/null", os.O_WRONLY)


def stop(process: psutil.Process) -> None:
    process.send_signal(signal.SIGSTOP)


def leave(_: psutil.Process) -> None:
    """Leave it as it is."""


async def every(seconds: float, act: Callable[[], Awaitable[None]]) -> None:
    """Begin something at a steady pace, whether or not what came before has ended."""
    loop = asyncio.get_running_loop()
    began, tasks = loop.time(), []
    for number in range(round(SECONDS / seconds)):
        await asyncio.sleep(began + number * seconds - loop.time())
        tasks.append(asyncio.ensure_future(act()))
    await asyncio.gather(*tasks)


async def probe(client: httpx.AsyncClient, seen: Seen) -> None:
    began = last = time.monotonic()
    while last - began < SECONDS:
        with suppress(httpx.HTTPError):
            if (await client.get("/ready")).status_code == 200:
                seen.longest_gap_s = max(seen.longest_gap_s, time.monotonic() - last)
                last = time.monotonic()
        await asyncio.sleep(0.1)


async def fill(port: int, seen: Seen) -> None:
    """Ask for the models again and again, over one connection."""
    head = (
        f"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\nX-Request-Id: {LONG_ID}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        writer.write(head.encode())
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200"), answer
        length = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await reader.readexactly(length)
        seen.lines += 1
    writer.close()


async def drive(port: int) -> Seen:
    seen = Seen()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30, limits=limits) as client:

        async def chat() -> None:
            body = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 4}
            try:
                reply = await client.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {KEY}"})
                seen.chats[reply.status_code] += 1
            except httpx.HTTPError as error:
                seen.chats[repr(error)] += 1

        async def stranger() -> None:
            reply = await client.get("/v1/models", headers={"Authorization": "Bearer no"})
            seen.strangers[reply.status_code] += 1

        async with asyncio.TaskGroup() as load:
            load.create_task(probe(client, seen))
            load.create_task(every(1 / CHATS_PER_S, chat))
            load.create_task(every(1 / STRANGERS_PER_S, stranger))
            for _ in range(FILLERS):
                load.create_task(fill(port, seen))
    return seen


@pytest.mark.parametrize(("log", "act"), [(unread_pipe, leave), (full_disk, leave), (read, stop)])
def test_s28_while_nobody_reads_the_log_of_serve_for_a_minute_everything_is_answered(
    log: Callable[[], tuple[int, int]], act: Callable[[psutil.Process], None], tiny: Folder, tmp_path: Path
) -> None:
    port, metrics_port = free_port(), free_port()
    ports = ("--port", port, "--metrics-port", metrics_port)
    flags = (*ports, "--api-key", KEY, "--rate", 500, "--preprocessing-processes", 1)
    reader, writer = log()
    try:
        with started(tmp_path, port, "testing", "serve", tiny("qwen2-vl"), *flags, output=writer) as serve:
            serve.until_ready("/ready")
            act(psutil.Process(serve.process.pid))
            seen = asyncio.run(asyncio.wait_for(drive(port), 3 * SECONDS))
            metrics = httpx.get(f"http://127.0.0.1:{metrics_port}/metrics", timeout=30).text
    finally:
        os.close(reader)
        os.close(writer)
    dropped = sum_of(metrics, "semel_log_lines_dropped_total")
    print(f"{seen}, dropped {dropped:g}")  # noqa: T201
    assert set(seen.chats) == {200}, seen
    assert set(seen.strangers) <= {401, 429}, seen
    assert seen.longest_gap_s <= MAX_GAP_S, seen
    assert dropped > 0, seen
