"""Workers that join, leave and are killed while requests are answered, over real sockets."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from semel.core import Digest, Feature, Submission
from semel.errors import ConfigError, WorkerLost
from semel.fleet.fleet import Fleet
from semel.fleet.membership import Membership
from semel.fleet.stream import BufferedAnswer, StreamedAnswer
from semel.fleet.worker import RemoteWorker
from semel.wire.zmq import Backoff, FrontendLink
from tests.waiting import until
from tests.wire.examples import KEY, digest_of
from tests.worker.pairing import Rig, expected, feature, prompt, rig

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
    async with AsyncExitStack() as stack:
        made = []
        for name in "ab":
            (tmp_path / name).mkdir(mode=0o700)
            made.append(await stack.enter_async_context(rig(tmp_path / name, frontends=0, pause_s=PAUSE_S)))
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


@asynccontextmanager
async def _worker(address: str) -> AsyncIterator[Process]:
    command = (sys.executable, "-m", "tests.frontend.echo_process", address, str(PAUSE_S))
    process = await asyncio.create_subprocess_exec(*command)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.timeout(120)
async def test_a_worker_that_is_killed_fails_no_request_that_had_not_streamed(
    frontend: Frontend, tmp_path: Path
) -> None:
    """Issue 8.4, `kill -9`: whole answers, begun or not, and streams that had not begun. Others hear the truth."""
    addresses = []
    async with AsyncExitStack() as stack:
        processes: dict[str, Process] = {}
        for name in "abc":
            (tmp_path / name).mkdir(mode=0o700)
            addresses.append(f"ipc://{tmp_path}/{name}/w.sock")
            processes[addresses[-1]] = await stack.enter_async_context(_worker(addresses[-1]))
        frontend.name(*addresses)
        await until(lambda: frontend.serving == set(addresses))
        outcomes = await _drive(frontend, processes)
    wholes, streams = outcomes[::2], outcomes[1::2]
    assert [whole for whole in wholes if whole.error is not None] == []
    assert [stream for stream in streams if stream.error is not None and not stream.begun] == []
    assert all(one.tokens == expected([one.number]) for one in outcomes if one.error is None)
    assert any(stream.error is not None for stream in streams), "the killed worker was not answering any stream"


class _Asked:
    """A request, and what became of it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.tokens: tuple[int, ...] = ()
        self.begun = False
        self.error: Exception | None = None

    async def ask(self, frontend: Frontend, kind: type[StreamedAnswer]) -> None:
        async with asyncio.timeout(60):
            try:
                stream = await frontend.submit(self.number, kind)
                async for output in stream:
                    self.begun = True
                    self.tokens += output.token_ids
                await stream.close()
            except Exception as error:  # noqa: BLE001
                self.error = error
                assert isinstance(error, WorkerLost)

    def __repr__(self) -> str:
        return f"{self.number}: {self.error!r} after {self.tokens}"


async def _drive(frontend: Frontend, processes: dict[str, Process]) -> list[_Asked]:
    """Ask for whole answers and streams in turn, a few at a time, and kill a worker in the midst of them."""
    asked = [_Asked(number) for number in range(120)]
    turns = asyncio.Semaphore(24)

    async def ask(one: _Asked) -> None:
        async with turns:
            await one.ask(frontend, StreamedAnswer if one.number % 2 else BufferedAnswer)

    def victim() -> RemoteWorker | None:
        """A worker that has begun a whole answer, and a stream of which the client has just got the first token."""
        for worker in frontend.fleet.serving:
            begun = [int(stream.request_id[1:]) for stream in worker._streams.values() if stream._make is None]
            if any(number % 2 == 0 for number in begun) and any(len(asked[number].tokens) == 1 for number in begun):
                return worker
        return None

    tasks = [asyncio.create_task(ask(one)) for one in asked]
    await until(lambda: sum(one.begun for one in asked) >= 30 and victim() is not None)
    killed = victim()
    assert killed is not None
    processes[killed.name].send_signal(signal.SIGKILL)
    await asyncio.gather(*tasks)
    return asked
