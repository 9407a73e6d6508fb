"""S6: a decoder that reads where nothing is ends its process, and costs one request. Real processes, real crashes."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from semel.core import Feature, Media, Target
from semel.errors import MediaUndecodable, RequestError
from semel.fairness.queue import FairQueue, WaitingTenant
from semel.processing.pool import fork_server as fork_server_module
from semel.processing.pool import pool as pool_module
from semel.processing.pool.pool import Pool
from semel.processing.pool.process import PoolProcess
from semel.processing.pool.processes import ProcessSet
from semel.processing.pool.quarantine import Quarantine
from tests.security.crashing_child import FAULT
from tests.security.messages import is_ours
from tests.waiting import until

ROOT = Path(__file__).parents[2]
CHILD = "tests.security.crashing_child"


def picture(colour: tuple[int, int, int], side: int = 16) -> Media:
    file = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(file, "PNG")
    return Media("image", file.getvalue(), "image/png")


@pytest.fixture(scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pool]:
    """As shipped, but for the decoder of its processes, which has a fault."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text("{}")
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server_module, "_PROGRAM", CHILD)
        patch.setenv("PYTHONPATH", paths)
        pool = await Pool.start(folder, Target("float32"), processes=2, spares=1, timeout_s=5)
        yield pool
        await pool.close()


@pytest.fixture(autouse=True)
async def whole(pool: Pool) -> None:
    """What another test has cost is there again."""
    await until(lambda: len(pool.pids) == 2 and len(pool.spare_pids) == 1, within_s=60)


async def check_a_crash_costs_one_request(pool: Pool, media: Media, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sent again and again, beside others: one process dies of it, of a signal that its own code has caused."""
    statuses: list[int] = []
    died = Pool._died

    async def dying(self: Pool, job: Any, status: int) -> Any:
        statuses.append(status)
        return await died(self, job, status)

    monkeypatch.setattr(Pool, "_died", dying)
    beside = [asyncio.create_task(pool.process(picture((1, 2, number)))) for number in range(8)]
    for _ in range(3):
        (refusal,) = await asyncio.gather(pool.process(media), return_exceptions=True)
        assert statuses == [-signal.SIGSEGV]
        assert isinstance(refusal, MediaUndecodable), "with 5xx a client would send it again"
        assert is_ours(str(refusal))
    assert all(isinstance(made, Feature) for made in await asyncio.gather(*beside))
    assert (await pool.process(picture((3, 2, 1)))).layout.num_embeds == 4


async def test_media_that_crash_their_process_cost_one_request_and_are_not_given_another_S6(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await check_a_crash_costs_one_request(pool, picture(FAULT, 16), monkeypatch)
    await until(lambda: len(pool.pids) == 2)
    assert pool.replaced == 1


class Forgetful(Quarantine):
    """Whatever ended a process is tried again."""

    async def refusal(self, media: Media, options: Mapping[str, object], tenant: str = "") -> RequestError | None:
        del media, options, tenant
        return None


async def test_a_mutant_that_forgets_what_crashed_loses_a_process_each_time_S6(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_deadly", Forgetful())
    with pytest.raises(AssertionError):
        await check_a_crash_costs_one_request(pool, picture(FAULT, 17), monkeypatch)


async def test_a_mutant_that_takes_a_crash_for_a_kill_is_found_S6(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client would be told to try again, and a second process would die of it."""
    monkeypatch.setattr(pool_module, "CRASHES", set())
    with pytest.raises(AssertionError):
        await check_a_crash_costs_one_request(pool, picture(FAULT, 18), monkeypatch)


async def test_a_mutant_whose_fault_is_an_exception_and_no_crash_is_found_S6(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the check is worth: media that are refused without a crash do not pass for ones that crash."""
    with pytest.raises(AssertionError):
        await check_a_crash_costs_one_request(pool, Media("image", b"no image"), monkeypatch)


LOAD_S = 4.0


async def slowest_beside_crashes(pool: Pool, monkeypatch: pytest.MonkeyPatch, seed: int) -> float:
    """How long a tenant's images wait at most while another one's crash process after process, which load slowly."""
    add, now = ProcessSet._add, asyncio.get_running_loop().time

    async def adding(self: ProcessSet) -> PoolProcess:
        await asyncio.sleep(LOAD_S)
        return await add(self)

    monkeypatch.setattr(ProcessSet, "_add", adding)
    crashed, slowest_s = 0, 0.0

    async def crash(sides: Iterator[int]) -> None:
        nonlocal crashed
        for side in sides:
            with contextlib.suppress(MediaUndecodable):
                await pool.process(picture(FAULT, side), tenant="mallory")
            crashed += 1

    await pool.process(picture((1, 2, 3), seed), tenant="alice")
    sides = iter(range(seed, seed + 999))
    crashing = [asyncio.create_task(crash(sides)) for _ in range(4)]
    began = now()
    while now() < began + 4 * LOAD_S:
        asked = now()
        await pool.process(picture((1, 2, 3), seed), tenant="alice")
        slowest_s = max(slowest_s, now() - asked)
        await asyncio.sleep(0.1)
    for task in crashing:
        task.cancel()
    await asyncio.gather(*crashing, return_exceptions=True)
    assert crashed >= 2
    return slowest_s


@pytest.mark.slow
async def test_a_tenant_whose_media_crash_processes_takes_not_the_last_one_from_others_S6_S29(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anyone can write such an item: a page of a document that unpacks to more memory than a process may use."""
    assert await slowest_beside_crashes(pool, monkeypatch, 100) < LOAD_S / 2


@pytest.mark.slow
async def test_a_mutant_that_forgets_whose_item_ended_a_process_leaves_others_without_one_S6_S29(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forgiving(FairQueue[Any]):
        """Gives turns to whoever is next."""

        def next_for(self, slots: int) -> WaitingTenant[Any] | None:
            for tenant in self._tenants.values():
                tenant.lost = 0
            return super().next_for(slots)

    monkeypatch.setattr(pool, "_waiting", Forgiving())
    assert await slowest_beside_crashes(pool, monkeypatch, 300) > LOAD_S / 2
