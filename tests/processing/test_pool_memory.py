"""The pool with shared memory: its processes write features where they will be read, with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from semel.cache import SharedCache
from semel.core import Digest, Media
from semel.errors import MediaTooLarge, MediaUndecodable
from semel.frontend.budget import Budget
from semel.frontend.limits import BudgetLimits
from semel.processing import HfProcessor
from semel.processing.pool.pool import Pool
from tests.processing.test_pool import LOADING_S, TARGET, content, picture
from tests.waiting import until

pytestmark = pytest.mark.slow

Folder = Callable[[str], Path]
ROOM = 2 << 20


@pytest.fixture(scope="module")
async def memory() -> AsyncIterator[SharedCache]:
    memory = SharedCache.create(ROOM)
    yield memory
    memory.close()


@pytest.fixture(scope="module")
async def pool(tiny: Folder, memory: SharedCache) -> AsyncIterator[Pool]:
    pool = await Pool.start(tiny("qwen2-vl"), TARGET, processes=1, spares=0, timeout_s=5, memory=memory)
    yield pool
    await pool.close()


async def test_a_feature_is_written_where_it_is_then_held_D4(pool: Pool, memory: SharedCache, tiny: Folder) -> None:
    media = picture(140, 84)
    made = await pool.process(media)
    assert content(made) == content(HfProcessor.load(tiny("qwen2-vl"), TARGET).process(media, {}))
    assert all(tensor.data.readonly for tensor in made.tensors.values())
    held = memory.put(Digest(bytes(32)), made)
    assert held is made
    assert memory.occupied == memory.nbytes > made.nbytes
    memory.clear()


async def test_a_feature_that_nobody_keeps_gives_its_room_back_D4(pool: Pool, memory: SharedCache) -> None:
    for _ in range(3):
        await pool.process(picture(280, 280))
    await asyncio.sleep(0)  # the loop itself refers to the last result until its next turn
    assert memory.occupied == 0


async def test_a_feature_for_which_there_is_no_room_comes_through_the_pipe_D4(pool: Pool, memory: SharedCache) -> None:
    all_of_it = memory.reserve(ROOM)
    assert all_of_it is not None
    made = await pool.process(picture(140, 84))
    assert memory.put(Digest(bytes(32)), made) is made
    assert len(memory) == 0
    all_of_it.release()


async def test_a_process_that_is_killed_gives_its_room_back_D4(pool: Pool, memory: SharedCache) -> None:
    (pid,) = pool.pids
    os.kill(pid, signal.SIGSTOP)
    making = asyncio.create_task(pool.process(picture(140, 84)))
    await until(lambda: not any(child.free for child in pool.processes.children))
    os.kill(pid, signal.SIGKILL)
    await making  # by another process
    del making
    await until(lambda: bool(pool.pids) and pid not in pool.pids, within_s=LOADING_S)
    await pool.process(picture(140, 84))
    await asyncio.sleep(0)
    assert memory.occupied == 0


async def test_a_layout_takes_no_room_and_counts_as_nothing_made_E1(pool: Pool, memory: SharedCache) -> None:
    item, counted = picture(560, 560), (pool.processed, pool.failed)
    layout = await pool.lay_out(item)
    assert (memory.occupied, pool.processed, pool.failed) == (0, *counted)
    assert layout == (await pool.process(item, apart=True)).layout
    with pytest.raises(MediaUndecodable):
        await pool.lay_out(Media("image", b"no picture"))
    assert pool.failed == counted[1]


async def test_what_is_made_apart_takes_no_room_E1(pool: Pool, memory: SharedCache) -> None:
    before = memory.evictions
    kept = [await pool.process(picture(560, 560), apart=True) for _ in range(3)]
    assert memory.occupied == 0
    assert memory.evictions == before
    assert all(feature.nbytes for feature in kept)


async def test_a_feature_without_room_is_charged_before_it_comes_and_one_with_room_is_not_S21(
    pool: Pool, memory: SharedCache
) -> None:
    spent: list[int] = []
    media = picture(140, 84)
    inside = await pool.process(media, spend=spent.append)
    assert spent == []
    all_of_it = memory.reserve(ROOM - memory.occupied - 4_096)
    assert all_of_it is not None
    outside = await pool.process(picture(280, 280), spend=spent.append)
    assert len(spent) == 1
    assert spent[0] >= outside.nbytes
    apart = await pool.process(media, apart=True, spend=spent.append)
    assert spent[1] >= apart.nbytes == inside.nbytes
    account, (pid,) = Budget(BudgetLimits(1_000, 1_000)).open(), pool.pids
    with pytest.raises(MediaTooLarge, match="--feature-cache-gb"):
        await pool.process(picture(280, 280), spend=account.take_feature)
    assert account.charged == 0
    assert pool.pids == (pid,)
    all_of_it.release()
    del inside
