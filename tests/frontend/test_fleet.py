"""Several workers behind one frontend, over real sockets: which one answers, and what happens when it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from semel.core import Digest, Feature
from semel.engine import Submission
from semel.errors import NotReady, WorkerLost
from semel.frontend.fleet import Fleet, FleetStream
from tests.wire.examples import digest_of
from tests.worker.pairing import Frontend, Rig, expected, feature, prompt, rig


@dataclass
class Two:
    """Two workers, and one frontend before them."""

    rigs: list[Rig]
    fleet: Fleet

    @property
    def sides(self) -> list[Frontend]:
        return [one.frontends[0] for one in self.rigs]

    async def submit(self, request_id: str, number: int) -> FleetStream:
        async def make(_: Digest) -> Feature:
            return feature(number)

        worker = self.fleet.choose([digest_of(number)])
        return await self.fleet.submit(worker, Submission(request_id, prompt([number]), {}), make)


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Two]:
    async with AsyncExitStack() as stack:
        rigs = []
        for name in "ab":
            (tmp_path / name).mkdir(mode=0o700)
            rigs.append(await stack.enter_async_context(rig(tmp_path / name)))
        yield Two(rigs, Fleet([one.frontends[0].worker for one in rigs]))


async def tokens(stream: FleetStream) -> tuple[int, ...]:
    async with asyncio.timeout(10):
        return tuple([token async for output in stream for token in output.token_ids])


async def lose(one: Rig) -> None:
    """Let the worker's end of all sessions go."""
    for peer in one.listener.peers:
        one.listener.close(peer, "lost")
    await asyncio.sleep(0)


async def test_a_request_goes_where_its_items_are_held(two: Two) -> None:
    for number in range(8):
        first = await two.submit(f"a{number}", number)
        assert await tokens(first) == expected([number])
        await first.close()
        assert await tokens(await two.submit(f"b{number}", number)) == expected([number])
    assert sum(side.metric("semel_features_sent_total") for side in two.sides) == 8
    assert all(len(one.engine) for one in two.rigs)


async def test_a_request_whose_worker_is_lost_before_its_first_output_is_answered_by_another_D3(two: Two) -> None:
    for one in two.rigs:
        one.engine.pause_s = 0.1
    stream = await two.submit("r", 1)
    (busy,) = [one for one in two.rigs if one.engine.submissions]
    await lose(busy)
    assert await tokens(stream) == expected([1])
    assert [one.engine.submissions for one in two.rigs] == [1, 1]
    await stream.close()
    queries = sum(side.metric("semel_mm_cache_queries_total") for side in two.sides)
    assert queries == 1, "one query per item and request, however many workers it took (D8)"


async def test_an_answer_that_has_begun_ends_with_the_truth(two: Two) -> None:
    for one in two.rigs:
        one.engine.pause_s = 0.05
    stream = await two.submit("r", 1)
    (busy,) = [one for one in two.rigs if one.engine.submissions]
    with pytest.raises(WorkerLost, match="send the request again"):
        async for _ in stream:
            await lose(busy)


async def test_without_any_worker_the_reason_is_told(two: Two) -> None:
    for one in two.rigs:
        await lose(one)
    async with asyncio.timeout(5):
        while two.fleet.serving:  # noqa: ASYNC110
            await asyncio.sleep(0)
    with pytest.raises(NotReady, match="lost"):
        two.fleet.choose([])
