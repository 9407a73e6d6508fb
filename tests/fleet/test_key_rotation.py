"""Transport keys are rotated and retired under load: three frontends, two workers, no request fails, nothing is made
or sent again. Over real sockets, with engines that hold what they were sent."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest

from semel.cache import Borrower, SharedCache
from semel.core import Digest, Feature, Submission
from semel.errors import SemelError
from semel.fleet import membership
from semel.fleet.fleet import Fleet
from semel.fleet.membership import Membership
from semel.fleet.stream import StreamedAnswer
from semel.fleet.worker import RemoteWorker
from semel.lab.testing.engine import EchoEngine, EchoStream
from semel.telemetry import Meter
from semel.wire.keys import TransportKeys
from semel.wire.zmq import Backoff, FrontendLink, WorkerListener, memory_path
from semel.wire.zmq.key_pairs import KeyPairs
from semel.worker.worker import Worker
from tests.waiting import until
from tests.wire.examples import CONTRACT, digest_of
from tests.worker.pairing import ITEM_BYTES, expected, feature, prompt

FRONTENDS, WORKERS, ITEMS = 3, 2, 4
OLD = KeyPairs.make(1_000)
BOTH = OLD.rotate(2_000)
NEW = BOTH.retire()
SOON = Backoff(first_s=0.01, max_s=0.05)


class CountingEngine(EchoEngine):
    """Counts the features that it is given: each would be an item to encode."""

    arrivals = 0

    async def submit(self, submission: Submission) -> EchoStream:
        self.arrivals += len(submission.features)
        return await super().submit(submission)


@dataclass(eq=False)
class Frontend:
    """A frontend with its load: it counts what it had to make, and which requests failed."""

    number: int
    keys: TransportKeys
    memory: SharedCache | None
    made: list[int] = field(default_factory=list)
    answered: int = 0
    failed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.meter = Meter()
        self.fleet = Fleet()
        renew = partial(self._connect, newest_only=True)
        self.members = Membership(self.fleet, self._connect, renew=renew, keys=self.keys)

    @asynccontextmanager
    async def _connect(self, address: str, *, newest_only: bool = False) -> AsyncIterator[RemoteWorker]:
        name = f"f{self.number}"
        async with FrontendLink(
            address, key=self.keys, frontend_id=name, backoff=SOON, newest_only=newest_only
        ) as link:
            yield RemoteWorker(link, memory=self.memory, meter=self.meter)

    def replace_keys(self, keys: TransportKeys) -> None:
        self.keys = keys
        self.members.replace_keys(keys)

    async def run(self, addresses: list[str]) -> None:
        async def lists() -> AsyncIterator[list[str]]:
            yield addresses
            await asyncio.Event().wait()

        await self.members.run(lists())

    @property
    def generations(self) -> list[int]:
        return [worker.generation for worker in self.fleet.workers if worker.is_connected]

    async def load(self, offset: int) -> None:
        """Ask about the same items again and again, until a request fails."""
        count = 0
        while not self.failed:
            count += 1
            await self.ask(f"r{self.number}-{offset}-{count}", (offset + count) % ITEMS)

    async def ask(self, request_id: str, item: int) -> None:
        async def make(_: Digest) -> Feature:
            self.made.append(item)
            made = feature(item)
            return made if self.memory is None else self.memory.put(digest_of(item), made)

        try:
            with self.fleet.preparing([digest_of(item)]) as worker:
                await asyncio.sleep(0.001)  # it is prepared for the worker that was chosen
                stream = await self.fleet.submit(worker, Submission(request_id, prompt([item]), {}), make)
            if await _tokens(stream) == expected([item]):
                self.answered += 1
            else:
                self.failed.append(f"{request_id}: another answer")
        except SemelError as error:
            self.failed.append(f"{request_id}: {error}")


async def _tokens(stream: StreamedAnswer) -> tuple[int, ...]:
    async with asyncio.timeout(60):
        try:
            return tuple([token async for output in stream for token in output.token_ids])
        finally:
            await stream.close()


@dataclass
class World:
    """Three frontends and two workers under load."""

    engines: list[CountingEngine] = field(default_factory=list)
    listeners: list[WorkerListener] = field(default_factory=list)
    frontends: list[Frontend] = field(default_factory=list)

    @property
    def answered(self) -> int:
        return sum(one.answered for one in self.frontends)

    @property
    def failed(self) -> list[str]:
        return [line for one in self.frontends for line in one.failed]

    @property
    def work(self) -> tuple[int, ...]:
        """Features that were made, and those that each engine was given."""
        return sum(len(one.made) for one in self.frontends), *(engine.arrivals for engine in self.engines)

    async def until_calm(self) -> None:
        """Wait until requests are answered and nothing is made or sent for them: several began at the same time."""
        before: tuple[int, ...] = ()
        while before != self.work:
            before = self.work
            await self.until_answered(30)

    async def until_answered(self, more: int) -> None:
        goal = self.answered + more
        await until(lambda: self.answered >= goal or bool(self.failed), within_s=60)

    async def until_all_have(self, generation: int) -> None:
        def is_so() -> bool:
            return all(one.generations == [generation] * WORKERS for one in self.frontends) or bool(self.failed)

        await until(is_so, within_s=60)
        assert not self.failed


@contextmanager
def _memory(is_shared: bool) -> Iterator[SharedCache | None]:
    memory = SharedCache.create(2 * ITEMS * (ITEM_BYTES + 128)) if is_shared else None
    try:
        yield memory
    finally:
        if memory is not None:
            memory.close()


@asynccontextmanager
async def world(folder: Path, scheme: str) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        made, tasks = World(), []
        for number in range(WORKERS):
            address = f"ipc://{folder}/w{number}.sock" if scheme == "ipc" else "tcp://127.0.0.1:*"
            engine = CountingEngine(replace(CONTRACT, cache_bytes=2 * ITEMS * ITEM_BYTES), pause_s=0.002)
            listener = WorkerListener(address, key=OLD.worker, contract=engine.contract)
            await stack.enter_async_context(listener)
            path = memory_path(listener.address)
            borrower = None if path is None else await stack.enter_async_context(Borrower(path))
            tasks.append(asyncio.create_task(Worker(engine, listener, borrower).run()))
            made.engines.append(engine)
            made.listeners.append(listener)
        addresses = [one.address for one in made.listeners]
        for number in range(FRONTENDS):
            memory = stack.enter_context(_memory(scheme == "ipc"))
            frontend = Frontend(number, OLD.frontend, memory)
            stack.push_async_callback(frontend.members.close)
            tasks.append(asyncio.create_task(frontend.run(addresses)))
            made.frontends.append(frontend)
        try:
            await made.until_all_have(1)
            for frontend in made.frontends:
                tasks += [asyncio.create_task(frontend.load(offset)) for offset in range(4)]
            await until(lambda: all(len(engine) == ITEMS for engine in made.engines), within_s=60)
            await made.until_calm()
            yield made
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(
    ("order", "scheme"),
    [
        ("workers first", "ipc"),
        ("frontends first", "tcp"),
        pytest.param("one by one", "tcp", marks=pytest.mark.slow),
    ],
)
async def test_keys_are_rotated_and_retired_under_load_without_a_failed_request_or_a_new_feature(
    tmp_path: Path, scheme: str, order: str
) -> None:
    async with world(tmp_path, scheme) as running:
        before = running.work
        for pairs in (BOTH, NEW):
            parts: list[WorkerListener | Frontend] = [*running.listeners, *running.frontends]
            if order == "frontends first":
                parts.reverse()
            for part in parts:
                part.replace_keys(pairs.worker if isinstance(part, WorkerListener) else pairs.frontend)
                if order == "one by one":
                    await running.until_answered(10)
            await running.until_all_have(2)
            await until(lambda: all(one.generations.get(1, 0) == 0 for one in running.listeners), within_s=60)
        await running.until_answered(30)
        assert running.failed == []
        assert running.work == before, "nothing was made or sent again"
        assert all(one.generations == {2: FRONTENDS} for one in running.listeners)


async def test_control_keys_that_are_simply_replaced_fail_requests(tmp_path: Path) -> None:
    async with world(tmp_path, "tcp") as running:
        for listener in running.listeners:
            listener.replace_keys(NEW.worker)
        for frontend in running.frontends:
            frontend.replace_keys(NEW.frontend)
        await until(lambda: bool(running.failed), within_s=60)


class CountingFrontend(Frontend):
    """Counts its links by whether they are second ones."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.links = Counter[bool]()
        self.lists: asyncio.Queue[list[str]] = asyncio.Queue()

    @asynccontextmanager
    async def _connect(self, address: str, *, newest_only: bool = False) -> AsyncIterator[RemoteWorker]:
        async with super()._connect(address, newest_only=newest_only) as worker:
            self.links[newest_only] += 1
            try:
                yield worker
            finally:
                self.links[newest_only] -= 1

    async def run(self, addresses: list[str]) -> None:
        async def lists() -> AsyncIterator[list[str]]:
            yield addresses
            while True:
                yield await self.lists.get()

        await self.members.run(lists())


@asynccontextmanager
async def renewing_in_vain(folder: Path) -> AsyncIterator[CountingFrontend]:
    """A frontend that tries to renew its link to a worker, which does not have the newest keys."""
    async with WorkerListener(f"ipc://{folder}/w.sock", key=OLD.worker, contract=CONTRACT) as listener:
        frontend = CountingFrontend(0, BOTH.frontend, None)
        tasks = [asyncio.create_task(Worker(EchoEngine(CONTRACT), listener, None).run())]
        tasks.append(asyncio.create_task(frontend.run([listener.address])))
        try:
            await until(lambda: frontend.links == {False: 1, True: 1})
            yield frontend
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await frontend.members.close()


@pytest.mark.parametrize("end", ["leaves", "closed"])
async def test_a_worker_that_goes_while_its_link_is_renewed_leaves_no_link_behind(tmp_path: Path, end: str) -> None:
    async with renewing_in_vain(tmp_path) as frontend:
        if end == "leaves":
            frontend.lists.put_nowait([])
            await until(lambda: not frontend.fleet.workers and not frontend.links[False])
        else:
            await frontend.members.close()
        assert frontend.links == {False: 0, True: 0}


async def test_control_a_renewal_that_is_not_ended_is_tried_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go_on(_: object) -> None: ...

    monkeypatch.setattr(membership, "_end_renewal", go_on)
    async with renewing_in_vain(tmp_path) as frontend:
        frontend.lists.put_nowait([])
        await until(lambda: not frontend.fleet.workers and not frontend.links[False])
        (renewal,) = [task for task in asyncio.all_tasks() if "Membership._renew " in str(task.get_coro())]
        await asyncio.wait([renewal], timeout=0.3)
        assert frontend.links[True] == 1
        assert not renewal.done()
