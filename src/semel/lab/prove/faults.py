"""The faults of a run, drawn from its seed: one at a time of each group, so that something is left to answer.

Workers, frontends and stores are groups: while a worker is away, or comes back, no other one is touched. A fault that
needs what this run does not have, such as an engine, is not drawn.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from semel.lab.bench.serving.procfs import descendants, words_of
from semel.lab.prove.processes import SEMEL, Node
from semel.lab.prove.work import Recorder
from semel.lab.prove.world import World
from semel.telemetry import metrics
from semel.telemetry.scrape import Scrape

__all__ = ["Faults"]

logger = logging.getLogger(__name__)

_END_S: Final = 60.0
_POLL_S: Final = 0.25
_SHORT_S: Final = (0.5, 3.0)
_LONG_S: Final = (1.0, 6.0)
_ENGINE: Final = "EngineCore"
_LEASE_BYTES: Final = 64
_MESSAGE_CHARS: Final = 4_000
"""Room for the end of a log."""

_FORK_SERVER: Final = "fork_server_child"


@dataclass(frozen=True, slots=True)
class _Fault:
    group: str
    name: str
    make: Callable[[], Awaitable[None]]


class Faults:
    """Makes a fault every so often, until it is cancelled."""

    def __init__(self, world: World, recorder: Recorder, *, seed: int, interval_s: float) -> None:
        self.counts: Counter[str] = Counter()
        self.log: list[tuple[float, str]] = []
        """When each began, in seconds since the start."""

        self.failures: list[str] = []
        """Faults after which the fleet was not whole again."""

        self._world = world
        self._recorder = recorder
        self._random = Random(f"{seed}/faults")
        self._interval_s = interval_s
        self._began = time.monotonic()
        self._running: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Make faults until the task is cancelled."""
        self._began = time.monotonic()
        while True:
            await asyncio.sleep(self._interval_s)
            free = [one for one in self._possible() if one.group not in self._busy()]
            if not free:
                continue
            group = self._random.choice(sorted({one.group for one in free}))
            fault = self._random.choice([one for one in free if one.group == group])
            self.counts[fault.name] += 1
            self.log.append((round(time.monotonic() - self._began, 1), fault.name))
            self._running[group] = asyncio.create_task(self._make(fault))

    async def finish(self) -> None:
        """Wait until what was broken last is whole again."""
        await asyncio.gather(*self._running.values())

    def cancel(self) -> None:
        """Leave things as they are: the fleet ends."""
        for task in self._running.values():
            task.cancel()

    def _busy(self) -> set[str]:
        return {group for group, task in self._running.items() if not task.done()}

    async def _make(self, fault: _Fault) -> None:
        logger.info("fault: %s", fault.name)
        try:
            await fault.make()
            if fault.group in ("worker", "frontend", "keys"):
                await self._world.until_whole()
        except (AssertionError, OSError, TimeoutError, subprocess.SubprocessError) as error:
            self.failures.append(f"after {fault.name} the fleet was not whole again: {error!r}"[:_MESSAGE_CHARS])

    def _possible(self) -> list[_Fault]:
        world, shape = self._world, self._world.shape
        if shape.is_bare:
            return [
                _Fault("frontend", "server killed", self._kill_bare),
                _Fault("frontend", "engine killed", self._kill_bare_engine),
                _Fault("frontend", "server stopped", self._stop_frontend),
                _Fault("frontend", "server rolled", self._roll_bare),
            ]
        found = [
            _Fault("frontend", "preprocessing process killed", self._kill_pool_process),
            _Fault("media", "fetched media deleted", self._delete_fetched),
            _Fault("media", "fetched media exchanged", self._exchange_fetched),
        ]
        if shape.workers > 1:
            found += [
                _Fault("worker", "worker killed", self._kill_worker),
                _Fault("worker", "worker stopped", self._stop_worker),
                _Fault("worker", "worker rolled", self._roll_worker),
            ]
            found += [_Fault("worker", "link cut", self._cut)] if world.relays else []
            found += [_Fault("worker", "engine killed", self._kill_engine)] if shape.has_engines else []
        if shape.frontends > 1:
            found += [
                _Fault("frontend", "frontend killed", self._kill_frontend),
                _Fault("frontend", "frontend stopped", self._stop_frontend),
                _Fault("frontend", "frontend rolled", self._roll_frontend),
            ]
        if shape.transport == "tcp":
            found.append(_Fault("keys", "keys rotated", self._rotate_keys))
        if (store := world.store) is not None:
            found += [
                _Fault("store", "embedding store emptied", store.empty),
                _Fault("store", "embedding store full", lambda: store.fill(self._seconds(_LONG_S))),
                _Fault("store", "embedding store stopped", lambda: store.stop(self._seconds(_LONG_S))),
                _Fault("store", "embedding store killed", lambda: store.kill(self._seconds(_LONG_S))),
            ]
        return found

    def _seconds(self, bounds: tuple[float, float]) -> float:
        return self._random.uniform(*bounds)

    async def _worker(self) -> Node:
        node = self._random.choice(self._world.fleet.running_workers)
        await self._recorder.read(node)
        return node

    async def _frontend(self) -> Node:
        node = self._random.choice(self._world.fleet.running_frontends)
        await self._recorder.read(node)
        return node

    async def _kill_worker(self) -> None:
        node = await self._worker()
        await asyncio.to_thread(node.kill)
        self._world.begin_worker(node.address)

    async def _roll_worker(self) -> None:
        node = await self._worker()
        await asyncio.to_thread(node.end)
        self._world.begin_worker(node.address)

    async def _kill_engine(self) -> None:
        """Kill the engine's own process; its worker ends of it."""
        node = await self._worker()
        _kill(_engines(node.family()))
        await asyncio.to_thread(node.process.wait, _END_S)
        self._world.begin_worker(node.address)

    async def _stop_worker(self) -> None:
        await _stopped(await self._worker(), self._seconds(_LONG_S))

    async def _cut(self) -> None:
        relay = self._random.choice(list(self._world.relays.values()))
        await relay.cut(self._seconds(_SHORT_S))

    async def _kill_frontend(self) -> None:
        await asyncio.to_thread((await self._frontend()).kill)
        self._world.begin_frontend()

    async def _roll_frontend(self) -> None:
        """Start another one first, as a deployment does."""
        node = await self._frontend()
        self._world.begin_frontend()
        await self._world.until_whole()
        await asyncio.to_thread(node.end)

    async def _kill_bare(self) -> None:
        _kill(await asyncio.to_thread((await self._frontend()).kill))
        self._world.begin_frontend()

    async def _kill_bare_engine(self) -> None:
        """Kill its engine, and what is left of it when it has noticed."""
        node = await self._frontend()
        family = node.family()
        _kill(_engines(family))
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(node.process.wait, _END_S)
        _kill(family)
        await asyncio.to_thread(node.process.wait, _END_S)
        self._world.begin_frontend()

    async def _roll_bare(self) -> None:
        """End it, and start it again: it has the machine's only device."""
        await asyncio.to_thread((await self._frontend()).end)
        self._world.begin_frontend()

    async def _stop_frontend(self) -> None:
        await _stopped(await self._frontend(), self._seconds(_SHORT_S))

    async def _kill_pool_process(self) -> None:
        family = (await self._frontend()).family()
        servers = {pid for pid in family if any(_FORK_SERVER in word for word in words_of(pid))}
        forked = [pid for server in servers for pid in descendants(server) if pid != server]
        if forked:
            with suppress(ProcessLookupError):
                os.kill(self._random.choice(forked), signal.SIGKILL)

    async def _rotate_keys(self) -> None:
        """Add a generation of transport keys, and retire the older one once no link has it, as `semel key` says."""
        before = max(await asyncio.to_thread(self._key_generations), default=0)
        await asyncio.to_thread(self._change_keys, "rotate")
        async with asyncio.timeout(_END_S):
            while min(await asyncio.to_thread(self._key_generations), default=0) <= before:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
        await asyncio.to_thread(self._change_keys, "retire")

    def _change_keys(self, word: str) -> None:
        command = [*SEMEL, "key", word, str(self._world.home / "keys")]
        subprocess.run(command, check=True, capture_output=True)  # noqa: S603

    def _key_generations(self) -> list[float]:
        """Return the generations that links of frontends have; of one that does not answer, none."""
        found: list[float] = []
        for node in self._world.fleet.running_frontends:
            with suppress(OSError, http.client.HTTPException):
                found += Scrape.parse(node.metrics()).values(metrics.LINK_KEY_GENERATION, "worker").values()
        return found

    async def _delete_fetched(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self._fetched, ignore_errors=True)

    async def _exchange_fetched(self) -> None:
        """Let two records of fetched media change places: a seal covers where a record is."""
        with suppress(OSError):  # frontends and the other fault delete files meanwhile
            files = sorted(path for path in self._fetched.rglob("*") if path.is_file())
            if len(files) < 2:
                return
            one, other = self._random.sample(files, 2)
            contents = one.read_bytes(), other.read_bytes()
            if min(map(len, contents)) > _LEASE_BYTES:
                one.write_bytes(contents[1])
                other.write_bytes(contents[0])

    @property
    def _fetched(self) -> Path:
        return self._world.home / "media" / "fetched"


def _engines(family: Iterable[int]) -> list[int]:
    return [pid for pid in family if any(_ENGINE in word for word in words_of(pid))]


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def _stopped(node: Node, seconds: float) -> None:
    """Stop a process for so long, without the others that it has started."""
    node.process.send_signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        node.process.send_signal(signal.SIGCONT)
