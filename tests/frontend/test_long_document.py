"""Two hundred pages through `semel frontend`: bounded memory, an answer of `/ready` at any time, and once (S18)."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import psutil
import pytest

from semel.core import Target
from semel.lab.testing.pdf import page_of, pdf
from tests.frontend.test_start import Started, started
from tests.serve.served import sum_of

PAGES = 200
PADDING_BYTES = 8 << 20
MAX_GROWTH_BYTES = 160 << 20
"""For the document in JSON, in base64, decoded, and on its way to two processes; and for the features of all pages."""

COUNTERS = ("semel_pool_decoded_total", "semel_pool_processed_total")


async def counted(frontend: Started) -> list[float]:
    page = await frontend.metrics()
    return [sum_of(page, name) for name in COUNTERS]


def resident(pid: int) -> int:
    """Bytes of the frontend and its pool, without what they share."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(process.memory_info().rss - process.memory_info().shared for process in processes)


async def longest_gap_s(frontend: Started, until: asyncio.Task[object], seen: list[int]) -> float:
    gap_s = 0.0
    while not until.done():
        sent = time.perf_counter()
        assert (await frontend.client.get("/ready")).status_code == 200
        gap_s = max(gap_s, time.perf_counter() - sent)
        seen.append(resident(frontend.pid))
        await asyncio.wait([until], timeout=0.05)
    return gap_s


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(300)
async def test_two_hundred_pages_are_rendered_once_in_bounded_memory_while_ready_answers(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    padding = b"<</Length %d>>stream\n%s\nendstream" % (PADDING_BYTES, Random(1).randbytes(PADDING_BYTES))
    data = pdf([page_of(number) for number in range(PAGES)], objects=[padding])
    file = {"file_data": "data:application/pdf;base64," + base64.b64encode(data).decode(), "dpi": 36}
    content = [{"type": "file", "file": file}, {"type": "text", "text": "?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    flags = ("--preprocessing-processes", "2")
    async with started(tiny("qwen2-vl"), tmp_path, Target("float32", "engine"), *flags, images=PAGES) as frontend:

        async def ask() -> None:
            reply = await frontend.client.post("/v1/chat/completions", json=body, timeout=200)
            assert reply.status_code == 200, reply.text

        before, seen = resident(frontend.pid), list[int]()
        first = asyncio.create_task(ask())
        gap_s = await longest_gap_s(frontend, first, seen)
        await first
        assert gap_s <= 1.0
        assert max(seen) - before <= MAX_GROWTH_BYTES
        assert await counted(frontend) == [PAGES, PAGES]
        await ask()
        assert await counted(frontend) == [PAGES, PAGES]
        log = frontend.log.read_text()
        assert "no landlock" in log or "no seccomp" in log or "ERROR" not in log
