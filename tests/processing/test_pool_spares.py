"""A spare process takes over at once, and requests take turns, with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from semel.core import Feature, Media
from semel.processing.pool.pool import Pool
from semel.sizing import usable_cores
from tests.processing.test_pool import LOADING_S, TARGET, ended, picture, stopped
from tests.waiting import until

Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
async def pool(tiny: Folder) -> AsyncIterator[Pool]:
    pool = await Pool.start(tiny("qwen2-vl"), TARGET, processes=2, spares=1)
    yield pool
    spares = pool.spare_pids
    await pool.close()
    assert all(map(ended, spares))
    assert not pool.spare_pids


async def spare_of(pool: Pool) -> int:
    await until(lambda: len(pool.spare_pids) == 1, within_s=LOADING_S)
    return pool.spare_pids[0]


@pytest.mark.slow
@pytest.mark.alone
async def test_a_process_killed_during_200_requests_costs_none_of_them_and_a_second_D3(pool: Pool) -> None:
    spare, replaced = await spare_of(pool), pool.replaced
    room = asyncio.Semaphore(16)
    done_s: list[float] = []

    async def request(media: Media) -> Feature:
        async with room:
            feature = await pool.process(media)
        done_s.append(time.monotonic())
        return feature

    async with asyncio.timeout(60):
        requests = [asyncio.create_task(request(picture(560, 560 + 28 * (n % 5)))) for n in range(200)]
        await until(lambda: len(done_s) >= 50)
        victim, killed_s = pool.pids[0], time.monotonic()
        os.kill(victim, signal.SIGKILL)
        await until(lambda: spare in pool.pids)
        took_over_s = time.monotonic()
        results = await asyncio.gather(*requests, return_exceptions=True)
    assert [result for result in results if not isinstance(result, Feature)] == []
    assert took_over_s - killed_s < 1
    assert pool.replaced == replaced + 1
    assert len(pool.pids) == 2
    assert await spare_of(pool) not in (spare, victim)


@pytest.mark.slow
async def test_a_spare_that_dies_costs_nothing_and_another_is_started_D3(pool: Pool) -> None:
    spare, pids, replaced = await spare_of(pool), pool.pids, pool.replaced
    os.kill(spare, signal.SIGKILL)
    await until(lambda: spare not in pool.spare_pids)
    assert (await pool.process(picture(56, 56))).layout.num_embeds == 4
    assert await spare_of(pool) != spare
    assert (pool.pids, pool.replaced) == (pids, replaced)


@pytest.mark.slow
async def test_a_request_with_many_items_does_not_keep_one_with_one_waiting_D3(pool: Pool) -> None:
    """The processes stand still until all wait; then the order in which items are begun is that in which they end."""
    order: list[str] = []

    async def process(name: str, group: str) -> None:
        await pool.process(picture(56, 56), group=group)
        order.append(name)

    with stopped(pool) as pids:
        begun = [asyncio.create_task(process("begun", "many")) for _ in pids]
        many = [asyncio.create_task(process("many", "many")) for _ in range(40)]
        one = asyncio.create_task(process("one", "one"))
        await asyncio.sleep(0)
    await asyncio.gather(*begun, *many, one)
    assert order.index("one") <= len(pids) + 3


@pytest.mark.slow
async def test_items_without_a_group_take_turns_in_the_order_in_which_they_came_D3(pool: Pool) -> None:
    """One process stands still with the second item, so that the other ends items in the order in which it begins."""
    await until(
        lambda: len(pool.pids) == 2 and all(child.free for child in pool.processes.children), within_s=LOADING_S
    )
    ended_ones: list[int] = []

    async def process(number: int) -> None:
        await pool.process(picture(56, 56))
        ended_ones.append(number)

    with stopped(pool) as (first, _):
        tasks = [asyncio.create_task(process(number)) for number in range(20)]
        await asyncio.sleep(0)
        os.kill(first, signal.SIGCONT)
        await until(lambda: len(ended_ones) == 19)
    await asyncio.gather(*tasks)
    assert ended_ones == [0, *range(2, 20), 1]


def test_the_quota_of_a_container_bounds_the_processes(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    quota = tmp_path / "cpu.max"
    assert usable_cores(quota) == cores
    for text, expected in (
        ("max 100000\n", cores),
        ("50000 100000\n", 1),
        ("150000 100000\n", min(cores, 2)),
        ("6400000 100000\n", cores),
        ("nonsense", cores),
    ):
        quota.write_text(text)
        assert usable_cores(quota) == expected


@pytest.mark.slow
async def test_a_spare_loads_at_low_priority_and_then_works_at_that_of_the_pool_D3(pool: Pool) -> None:
    """Threads have priorities of their own: the one that serves must have kept its."""
    await spare_of(pool)
    for pid in (*pool.pids, *pool.spare_pids):
        assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, os.getpid())
