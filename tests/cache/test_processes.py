"""Lending between real processes, which are killed at the worst moment."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from semel.cache import Borrower, Lender, SharedCache
from tests.cache.examples import content, digest_of, feature_of
from tests.cache.lending_process import NBYTES, from_line, to_line
from tests.waiting import until


@asynccontextmanager
async def process(part: str, path: Path) -> AsyncIterator[Process]:
    command = (sys.executable, "-m", "tests.cache.lending_process", part, str(path))
    child = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    try:
        async with asyncio.timeout(100):
            yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def line_of(child: Process) -> bytes:
    assert child.stdout is not None
    async with asyncio.timeout(60):
        return (await child.stdout.readline()).strip()


async def test_a_borrower_that_is_killed_returns_its_leases_D3(tmp_path: Path) -> None:
    cache = SharedCache.create(1 << 20)
    async with process("keep", tmp_path / "memory") as child:
        assert await line_of(child) == b"ready"
        lender = await Lender.connect(tmp_path / "memory", cache)
        for number in range(3):
            cache.put(digest_of(number), feature_of(number, NBYTES))
            lease = lender.lend(digest_of(number))
            assert lease is not None
            assert child.stdin is not None
            child.stdin.write(to_line(lease, number))
            assert await line_of(child) == b"kept"
        assert (lender.leases, lender.closed) == (3, False)
        child.kill()
        async with asyncio.timeout(10):
            await lender.wait_closed()
    assert (cache.leases, lender.closed, lender.lend(digest_of(0))) == (0, True, None)


async def test_views_outlive_a_lender_that_is_killed_D3(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    async with Borrower(path) as borrowers:
        async with process("lend", path) as child:
            lease, number = from_line(await line_of(child))
            view = borrowers.borrow(lease)
            child.kill()
            await child.wait()
        await until(lambda: len(borrowers) == 0)
        assert view[:NBYTES] == content(number, 0, NBYTES)
        assert len(borrowers._leaving) == 1
        del view
        await until(lambda: not borrowers._leaving)
