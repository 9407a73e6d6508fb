"""Workers that join, leave and are killed while requests are answered, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from semel.core import Digest, Feature, Submission
from semel.errors import ConfigError
from semel.fleet.fleet import Fleet
from semel.fleet.membership import Membership
from semel.fleet.stream import StreamedAnswer
from semel.fleet.worker import RemoteWorker
from semel.wire.zmq import Backoff, FrontendLink
from tests.fleet.workers import several, standing
from tests.waiting import until
from tests.wire.examples import KEY, digest_of
from tests.worker.pairing import Rig, expected, feature, prompt

PAUSE_S = 0.05


@asynccontextmanager
async def connect(address: str) -> AsyncIterator[RemoteWorker]:
    backoff = Backoff(first_s=0.01, max_s=0.05)
    async with FrontendLink(address, key=KEY, frontend_id="f", backoff=backoff) as link:
        yield RemoteWorker(link)


class Frontend:
    """A fleet that follows the lists it is given."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.members = Membership(self.fleet, connect)
        self._lists: asyncio.Queue[Iterable[str]] = asyncio.Queue()

    async def run(self) -> None:
        await self.members.run(self._each())

    async def _each(self) -> AsyncIterator[Iterable[str]]:
        while True:
            yield await self._lists.get()

    def name(self, *addresses: str) -> None:
        self._lists.put_nowait(addresses)

    @property
    def serving(self) -> set[str]:
        return {worker.name for worker in self.fleet.serving}

    @property
    def linked(self) -> set[str]:
        return {worker.name for worker in self.fleet.workers}

    async def submit(self, number: int, kind: type[StreamedAnswer] = StreamedAnswer) -> StreamedAnswer:
        async def make(_: Digest) -> Feature:
            return feature(number)

        worker = self.fleet.choose([digest_of(number)])
        return await self.fleet.submit(worker, Submission(f"r{number}", prompt([number]), {}), make, kind)


@pytest.fixture
async def frontend() -> AsyncIterator[Frontend]:
    made = Frontend()
    running = asyncio.create_task(made.run())
    yield made
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await made.members.close()


@pytest.fixture
async def rigs(tmp_path: Path) -> AsyncIterator[list[Rig]]:
    async with several(tmp_path, frontends=0, pause_s=PAUSE_S) as made:
        yield made


async def tokens(stream: StreamedAnswer) -> tuple[int, ...]:
    async with asyncio.timeout(20):
        try:
            return tuple([token async for output in stream for token in output.token_ids])
        finally:
            await stream.close()


async def test_a_worker_that_is_named_joins_and_one_that_is_named_no_more_leaves(
    frontend: Frontend, rigs: list[Rig]
) -> None:
    a, b = (one.listener.address for one in rigs)
    frontend.name(a)
    await until(lambda: frontend.serving == {a})
    frontend.name(a, b)
    await until(lambda: frontend.serving == {a, b})
    frontend.name(b)
    await until(lambda: frontend.linked == {b})
    await until(lambda: not rigs[0].listener.peers)
    assert frontend.serving == {b}
    assert await tokens(await frontend.submit(1)) == expected([1])


async def test_what_a_leaving_worker_is_answering_is_answered_and_it_gets_nothing_new(
    frontend: Frontend, rigs: list[Rig]
) -> None:
    """Control: closing the link at once would have ended the answer with `WorkerLost`."""
    a, b = (one.listener.address for one in rigs)
    frontend.name(a)
    await until(lambda: frontend.serving == {a})
    with standing(rigs[:1]):
        stream = await frontend.submit(1)
        frontend.name(b)
        await until(lambda: frontend.serving == {b})
        assert frontend.linked == {a, b}, "it is still being listened to"
        assert await tokens(await frontend.submit(2)) == expected([2])
    assert await tokens(stream) == expected([1])
    await until(lambda: frontend.linked == {b})
    assert [one.engine.submissions for one in rigs] == [1, 1]


async def test_a_worker_that_is_named_again_while_it_leaves_stays(frontend: Frontend, rigs: list[Rig]) -> None:
    a, b = (one.listener.address for one in rigs)
    frontend.name(a, b)
    await until(lambda: frontend.serving == {a, b})
    with standing(rigs):
        stream = await frontend.submit(1)
        busy = next(one.listener.address for one in rigs if one.engine.submissions)
        (other,) = {a, b} - {busy}
        peers = {one.listener.address: one.listener.peers for one in rigs}
        frontend.name(other)
        await until(lambda: frontend.serving == {other})
        frontend.name(a, b)
        await until(lambda: frontend.serving == {a, b})
    assert await tokens(stream) == expected([1])
    assert {one.listener.address: one.listener.peers for one in rigs} == peers, "in the same sessions"


async def test_an_address_that_cannot_be_linked_to_keeps_nobody_else_out(
    frontend: Frontend, rigs: list[Rig], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    bad, good = f"ipc://{tmp_path}/open/w.sock", rigs[0].listener.address
    frontend.name(bad, good)
    await until(lambda: frontend.serving == {good} and "others can enter the socket directory" in caplog.text)
    with pytest.raises(ConfigError, match="others can enter"):
        await frontend.members.join(bad)
