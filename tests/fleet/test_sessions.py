"""Sessions that are replaced while requests are sent: none generates for nobody, and every answer comes (issue 17.4).

The frontend reads events behind its link. The worst moment is when the link has a new session and the frontend has not
yet read that the old one is over: what it sends then must not go into the new one.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from semel.core import Digest, Feature, Submission
from semel.errors import ProtocolError
from semel.fleet.fleet import Fleet
from semel.fleet.retry_policy import RetryPolicy
from semel.fleet.stream import BufferedAnswer, RemoteStream
from semel.fleet.worker import RemoteWorker
from semel.lab.testing.engine import EchoEngine, EchoStream
from semel.render import MakeFeature
from semel.wire.events import Event
from semel.wire.limits import Limits
from semel.wire.zmq import Backoff, Connected, FrontendLink, LinkSession, WorkerListener
from semel.worker.worker import Worker
from tests.waiting import until
from tests.wire.examples import CONTRACT, KEY, digest_of
from tests.worker.pairing import ITEM_BYTES, expected, feature, prompt

AT_ONCE = Backoff(first_s=0.0, max_s=0.0)
NEVER_S = 3_600.0
UNREAD_BYTES = 64 << 10


class CountingEngine(EchoEngine):
    """Counts the requests that it generates for."""

    def __init__(self, *, pause_s: float) -> None:
        super().__init__(replace(CONTRACT, cache_bytes=4 * ITEM_BYTES))
        self.first_token_s = pause_s
        self.generating: dict[str, EchoStream] = {}

    async def submit(self, submission: Submission) -> EchoStream:
        stream = await super().submit(submission)
        stream._pause_s = self.first_token_s
        self.generating = {name: one for name, one in self.generating.items() if not one.closed}
        self.generating[submission.request_id] = stream
        return stream

    @property
    def requests(self) -> set[str]:
        return {name for name, stream in self.generating.items() if not stream.closed}


class LateReader(RemoteWorker):
    """Reads its link's events as late as a test wants."""

    def __init__(self, link: FrontendLink) -> None:
        super().__init__(link)
        self.reads = asyncio.Event()
        self.reads.set()

    async def _on_event(self, event: Event | Connected) -> None:
        await self.reads.wait()
        await super()._on_event(event)


class NewestSession(LateReader):
    """The wrong implementation: it asks the link, and not the ledger, which session there is."""

    async def submit(
        self, submission: Submission, make: MakeFeature, *, watcher: RetryPolicy | None = None
    ) -> RemoteStream:
        attempt = self._link._attempt
        if attempt is not None:
            self._session = LinkSession(attempt.session, self._link._flush_soon, self._link._tell)
        return await super().submit(submission, make, watcher=watcher)


@dataclass
class Side:
    """A worker, its engine, and a frontend's end of it."""

    engine: CountingEngine
    worker: Worker
    listener: WorkerListener
    link: FrontendLink
    remote: LateReader

    async def replace_session(self, rng: random.Random) -> None:
        """End the session at either end, and wait until the link has the next one; its reader has not noticed."""
        assert self.link._attempt is not None
        before = self.link._attempt.session
        self.remote.reads.clear()
        if rng.random() < 0.5:
            (peer,) = self.listener.peers
            self.worker._dismiss(peer, "replaced by the worker")
        else:
            self.link._tell(before.reset("order", "replaced by the frontend"))
            self.link._flush_soon()
        await until(
            lambda: (now := self.link._attempt) is not None and now.session is not before and now.session.is_open
        )

    async def read_on(self) -> None:
        """Let the reader notice, and wait until it has."""
        sessions = self.remote.sessions
        self.remote.reads.set()
        await until(lambda: self.remote.sessions > sessions and self.remote.is_connected)


def made(folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    return folder


@asynccontextmanager
async def side(
    folder: Path, kind: type[LateReader], *, pause_s: float, limits: Limits | None = None
) -> AsyncIterator[Side]:
    address, engine = f"ipc://{made(folder)}/w.sock", CountingEngine(pause_s=pause_s)
    async with (
        WorkerListener(address, key=KEY, contract=engine.contract, limits=limits) as listener,
        FrontendLink(address, key=KEY, frontend_id="f", backoff=AT_ONCE, limits=limits) as link,
    ):
        worker, remote = Worker(engine, listener), kind(link)
        tasks = [asyncio.create_task(worker.run()), asyncio.create_task(remote.run())]
        try:
            await until(lambda: remote.is_connected)
            yield Side(engine, worker, listener, link, remote)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class Lost:
    """A worker that loses its sessions and never ends an answer, another that answers, and what was asked."""

    losing: Side
    answering: Side
    fleet: Fleet
    answers: list[asyncio.Task[tuple[int, ...]]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(10**9)))
    items: list[int] = field(default_factory=list)

    def ask(self, **sampling: object) -> str:
        """Submit to the worker that loses its sessions; another may answer."""
        number = next(self.numbers)
        item = number % 3
        self.items.append(item)
        self.answers.append(asyncio.create_task(self._answer(f"r{number}", item, sampling)))
        return f"r{number}"

    async def lost_answers(self) -> list[BaseException | tuple[int, ...]]:
        """Wait for all answers; returns those that are not as they should be."""
        answers = await asyncio.gather(*self.answers, return_exceptions=True)
        wanted = [expected([item]) for item in self.items]
        return [answer for answer, want in zip(answers, wanted, strict=True) if answer != want]

    async def _answer(self, name: str, item: int, sampling: Mapping[str, object]) -> tuple[int, ...]:
        async def make(_: Digest) -> Feature:
            return feature(item)

        submission = Submission(name, prompt([item]), {digest_of(item): feature(item)}, sampling)
        async with asyncio.timeout(60):
            stream = await self.fleet.submit(self.losing.remote, submission, make, BufferedAnswer)
            try:
                return tuple([token async for output in stream for token in output.token_ids])
            finally:
                await stream.close()


@asynccontextmanager
async def losing_sessions(folder: Path, kind: type[LateReader], limits: Limits | None = None) -> AsyncIterator[Lost]:
    async with (
        side(folder / "losing", kind, pause_s=NEVER_S, limits=limits) as losing,
        side(folder / "answering", LateReader, pause_s=0.0) as answering,
    ):
        yield Lost(losing, answering, Fleet([losing.remote, answering.remote]))


async def orphans(folder: Path, kind: type[LateReader], times: int) -> tuple[int, int]:
    """How many requests generated for nobody, and how many answers were lost, with a session replaced so often."""
    rng, found = random.Random(17), 0
    async with losing_sessions(folder, kind) as rig:
        losing = rig.losing
        for _ in range(times):
            early = rig.ask()
            await until(lambda name=early: name in losing.engine.requests)  # type: ignore[misc]
            # What it has got before this one in this session is there too, and has to have a reader.
            found += len(losing.engine.requests - losing.remote._streams.keys())
            await losing.replace_session(rng)
            rig.ask()
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            rig.ask()
            await asyncio.sleep(0)
            await losing.read_on()
        await losing.replace_session(rng)
        await losing.read_on()
        lost = await rig.lost_answers()
        await until(lambda: not losing.engine.requests and not rig.answering.engine.requests)
    return found, len(lost)


@pytest.mark.parametrize("times", [30, pytest.param(1_000, marks=pytest.mark.slow)])
async def test_with_a_session_replaced_at_the_worst_moment_no_request_generates_for_nobody(
    tmp_path: Path, times: int
) -> None:
    assert await orphans(tmp_path, LateReader, times) == (0, 0)


async def test_a_mutant_that_submits_into_the_newest_session_leaves_requests_that_nobody_reads(tmp_path: Path) -> None:
    found, _ = await orphans(tmp_path, NewestSession, 10)
    assert found >= 10


class RegardlessOfTheEnd(LateReader):
    """The wrong implementation: it goes on to send into a session that its own message has ended."""

    def _send_features(self, session: LinkSession, stream: RemoteStream, features: Mapping[Digest, Feature]) -> None:
        for digest, one in features.items():
            self._send_feature(session, stream, digest, one)


async def overrun(folder: Path, kind: type[LateReader]) -> list[BaseException | tuple[int, ...]]:
    """Send a worker that does not read more than it may leave unread; returns the answers that were lost."""
    async with losing_sessions(folder, kind, Limits(max_unread_bytes=UNREAD_BYTES)) as rig:
        for socket in rig.losing.listener._sockets.values():
            socket.pause()
        for _ in range(3):
            rig.ask(text="x" * (UNREAD_BYTES * 3 // 4))
        return await rig.lost_answers()


async def test_an_overrun_while_sending_is_a_failover(tmp_path: Path) -> None:
    assert await overrun(tmp_path, LateReader) == []


async def test_a_mutant_that_sends_on_after_an_overrun_fails_the_request(tmp_path: Path) -> None:
    (error,) = await overrun(tmp_path, RegardlessOfTheEnd)
    assert isinstance(error, ProtocolError)
