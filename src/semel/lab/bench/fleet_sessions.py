"""The sessions of `semel bench fleet`: one worker's listener and many links to it, over tcp with CURVE, in one process.

The listener runs in a thread with an event loop of its own, so that the time of either side is that of its threads.
The links are those of a frontend, each taken for another worker: all of them get at once what the worker holds.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import thread_time
from typing import Final

import uvloop

from semel.core import Contract, Digest, FeatureInfo, Field, Key, Target
from semel.errors import ServiceError
from semel.fleet.fleet import Fleet
from semel.fleet.worker import RemoteWorker
from semel.lab.bench.report import Check
from semel.lab.bench.settings import FleetOptions
from semel.wire.events import Admitted
from semel.wire.limits import Deadlines
from semel.wire.zmq import FrontendLink, LoopBudget, Peer, WorkerListener, link_context
from semel.worker.cache_updates import CacheUpdates, Load
from semel.worker.publisher import Publisher

__all__ = ["BENCH_CONTRACT", "BENCH_KEY", "measure_sessions"]

BENCH_KEY: Final = Key(b"semel bench fleet, no secret key")
BENCH_CONTRACT: Final = Contract(
    model="bench",
    fingerprint="bench",
    target=Target("float32"),
    fields={"image": {"pixel_values": Field("uint8", (None, 1))}},
    max_items={"image": 64},
    max_embeds=1 << 16,
    max_tokens=1 << 16,
)
_DEADLINES: Final = Deadlines(handshake_s=300.0, connection_s=300.0, silence_s=600.0)
"""Heartbeats as shipped; nobody is given up on because the machine is busy with something else."""

_START_S: Final = 60.0
_MAX_S: Final = 600.0
_SETTLE_S: Final = _DEADLINES.active_s + 2.0
_ROUNDS: Final = 20
_ROUND_S: Final = 0.3
"""Longer than the time between two rounds of updates."""

_MAX_IDLE: Final = 3.0
_MAX_TELLING_US: Final = 20.0
_POLL_S: Final = 0.05
_DESCRIPTORS_EACH: Final = 6
_AT_ONCE: Final = 50
_MAX_THREADS: Final = 4
_MAX_GAP_MS: Final = 50.0
_GC_THRESHOLDS: Final = (10_000, 2, 50)
"""As a frontend sets them."""

Tell = Callable[[str], None]


def measure_sessions(options: FleetOptions, items: Mapping[Digest, FeatureInfo], tell: Tell) -> list[Check]:
    """Open the sessions, let everything be announced, and then nothing happen."""
    with _many_files(options.sessions), _seldom_collected(), _Worker.running(items) as worker:
        return uvloop.run(_measure(options, worker, items, tell))


@dataclass(slots=True, eq=False)
class _Worker:
    """A listener in a thread of its own, which tells every client what it holds."""

    items: Mapping[Digest, FeatureInfo]
    loop: asyncio.AbstractEventLoop = field(default_factory=uvloop.new_event_loop)
    ready: threading.Event = field(default_factory=threading.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    publisher: Publisher = field(init=False)
    address: str = ""
    admitted: int = 0
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Whether it tells what it holds."""

    threads: set[str] = field(default_factory=set)
    """Its own, and that of its sockets."""

    @classmethod
    @contextmanager
    def running(cls, items: Mapping[Digest, FeatureInfo]) -> Iterator[_Worker]:
        """The worker, until it is left."""
        worker = cls(items)
        before = _threads()
        thread = threading.Thread(target=lambda: worker.loop.run_until_complete(worker._serve()), daemon=True)
        thread.start()
        try:
            if not worker.ready.wait(_START_S):
                raise ServiceError("the worker of the benchmark did not start")
            worker.threads = _threads() - before
            yield worker
        finally:
            worker.loop.call_soon_threadsafe(worker.over.set)
            thread.join(_START_S)

    async def tell_loads(self, rounds: int) -> float:
        """Return the seconds of its thread for telling all sessions so many times how busy it is."""
        began = thread_time()
        for number in range(1, rounds + 1):
            self.publisher.set_load(Load(number))
            await asyncio.sleep(_ROUND_S)
        return thread_time() - began

    async def _serve(self) -> None:
        address, deadlines = "tcp://127.0.0.1:*", _DEADLINES
        async with WorkerListener(address, key=BENCH_KEY, contract=BENCH_CONTRACT, deadlines=deadlines) as listener:
            self.publisher = Publisher(listener, CacheUpdates())
            for digest, info in self.items.items():
                self.publisher.hold(digest, info)
            self.address = listener.address
            self.ready.set()
            serving = [asyncio.create_task(one) for one in (self._announce(listener), self._begin(listener))]
            await self.over.wait()
            for task in serving:
                task.cancel()
            self.publisher.stop()

    async def _announce(self, listener: WorkerListener) -> None:
        async for peer, event in listener:
            if isinstance(event, Admitted):
                self.admitted += 1
                if self.has_begun.is_set():  # a session that was lost, and is there again
                    self._join(peer)

    async def _begin(self, listener: WorkerListener) -> None:
        await self.has_begun.wait()
        for peer in listener.peers:
            self._join(peer)
            await asyncio.sleep(0)

    def _join(self, peer: Peer) -> None:
        self.publisher.join(peer, None)


class _Gaps:
    """The CPU time of each iteration of the loop: what anybody else waits for."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._last = thread_time()
        self._is_over = False
        self._look()

    def end(self) -> float:
        """Return the longest."""
        self._is_over = True
        return self.longest_s

    def _look(self) -> None:
        now = thread_time()
        self.longest_s, self._last = max(self.longest_s, now - self._last), now
        if not self._is_over:
            self._loop.call_soon(self._look)


async def _measure(
    options: FleetOptions, worker: _Worker, items: Mapping[Digest, FeatureInfo], tell: Tell
) -> list[Check]:
    sessions = options.sessions
    async with AsyncExitStack() as stack:
        before, files = _threads(), _descriptors()
        context = await stack.enter_async_context(link_context())
        budget, fleet, tasks = LoopBudget(), Fleet(), []
        for number in range(sessions):
            name = f"bench-{number}"
            link = FrontendLink(
                worker.address, key=BENCH_KEY, frontend_id=name, deadlines=_DEADLINES, context=context, budget=budget
            )
            remote = _Named(await stack.enter_async_context(link), number)
            fleet.add(remote)
            tasks.append(asyncio.create_task(remote.run()))
            if number % _AT_ONCE == 0 or number == sessions - 1:  # both sides share a processor here
                await _until(lambda: len(fleet.serving) == len(fleet.workers))
        threads, descriptors = (
            len(_threads() - before),
            _descriptors() - files - sessions,
        )  # the worker has one for each
        tell(f"{sessions:,} sessions, to each of which {len(items):,} items are announced")
        gaps = _Gaps()
        worker.loop.call_soon_threadsafe(worker.has_begun.set)
        last = list(items)[-1]
        await _until(lambda: all(remote.holding(last) is not None for remote in fleet.workers))
        longest_s = gaps.end()
        resets = worker.admitted - sessions
        tell(f"{sessions:,} sessions, idle")
        idle, io = await _idle(worker, options.seconds)
        tell(f"{sessions:,} sessions, {_ROUNDS} rounds of updates")
        telling = asyncio.run_coroutine_threadsafe(worker.tell_loads(_ROUNDS), worker.loop)
        telling_s = await asyncio.wrap_future(telling) - idle * _ROUNDS * _ROUND_S
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    of = f"{sessions:,} sessions"
    return [
        Check.at_most(f"threads for {of}", threads, _MAX_THREADS, unit=""),
        Check(f"descriptors for one of {of}", descriptors / sessions, ""),
        Check.at_most(f"longest iteration while {of} are replayed", 1e3 * longest_s, _MAX_GAP_MS, unit="ms"),
        Check.at_most(f"sessions lost while {of} are replayed", resets, 0, unit=""),
        Check.at_most(f"idle worker with {of}, its event loop", 100 * idle, _MAX_IDLE, unit="% of a core"),
        Check(f"idle worker with {of}, its sockets' thread", 100 * io, "% of a core"),
        Check.at_most(f"telling one of {of}", 1e6 * telling_s / (_ROUNDS * sessions), _MAX_TELLING_US, unit="µs"),
    ]


class _Named(RemoteWorker):
    """A worker by another name than its address: all of them have the same here."""

    def __init__(self, link: FrontendLink, number: int) -> None:
        super().__init__(link)
        self.name = f"{self.name}#{number}"


async def _idle(worker: _Worker, seconds: float) -> tuple[float, float]:
    """Return the cores that a worker takes to do nothing: of its event loop, and of its sockets."""
    await asyncio.sleep(_SETTLE_S)
    loop = asyncio.run_coroutine_threadsafe(_thread_s(), worker.loop)
    before, all_before, at = await asyncio.wrap_future(loop), _cpu_s(worker.threads), asyncio.get_running_loop().time()
    await asyncio.sleep(seconds)
    after = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_thread_s(), worker.loop))
    elapsed = asyncio.get_running_loop().time() - at
    work = after - before
    return work / elapsed, max(0.0, _cpu_s(worker.threads) - all_before - work) / elapsed


async def _thread_s() -> float:
    return thread_time()


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(_MAX_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)


def _threads() -> set[str]:
    return {task.name for task in Path("/proc/self/task").iterdir()}


def _cpu_s(threads: set[str]) -> float:
    """Return the CPU time of threads of this process."""
    return sum(int(Path(f"/proc/self/task/{one}/schedstat").read_text().split()[0]) for one in threads) / 1e9


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@contextmanager
def _many_files(sessions: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 256 + _DESCRIPTORS_EACH * sessions
    if soft < wanted and hard != resource.RLIM_INFINITY and hard < wanted:
        raise ServiceError(f"{sessions:,} sessions need {wanted:,} descriptors, {hard:,} are allowed: ask for fewer")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def _seldom_collected() -> Iterator[None]:
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
