"""Faults of every part of a fleet under good requests: `python -m tools.fleet.faults [--brief] [--only NAME]`.

Two workers with real engines that share a Redis, two frontends with a media store, all of them processes on this
machine. A tenant sends chats at a steady rate: words, new images, a stored file, a schema, streams; each to a frontend
that is ready, as a balancer does. What is killed is started again at once, as Kubernetes or systemd does. A request
whose connection fails before it has an answer is sent again to the other frontend, as client libraries do; it is
counted. Any other status than 200 is a failure.

The table has, for each fault: good requests, those that failed before the first byte of their answer and those that
failed in their stream, those sent again, the longest time without an answer to any of them, and the seconds until
both frontends were ready with both workers again. The exit code is 1 if a request failed before its first byte.
`--brief` is without engines: a few minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from semel.lab.bench.serving.scenarios.restart import restart_flags
from semel.lab.prove.processes import Fleet, Node, running_fleet
from semel.lab.testing.models import build
from semel.telemetry.metrics import WORKER_CONNECTED
from tests.embeddings.redis import Redis, running_redis
from tests.serve.served import image_url, sum_of
from tools.fleet.plan import draw_images

CHAT: Final = "/v1/chat/completions"
KEYS: Final = {"alice": "an-api-key-of-alice", "mallory": "an-api-key-of-mallory"}
RATE: Final = 4.0
QUIET_S: Final = 4.0
"""Before a fault and after everything is ready again."""

STOPPED_S: Final = 12.0
"""How long a process is stopped: longer than a worker may be silent."""

REQUEST_S: Final = 150.0
PROBE_S: Final = 0.2
PROBE_TIMEOUT_S: Final = 1.0
WHOLE_S: Final = 300.0
SENT_AGAIN: Final = 5
STREAM_TOKENS: Final = 48
DISK_BYTES: Final = 16 << 20
ABORTS_AT_A_TIME: Final = 60
SCHEMA: Final = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
PROGRESS_S: Final = 10
DRAIN: Final = ("--drain-delay-s", "3")
"""A frontend takes requests for so long after SIGTERM; a balancer has noticed by then."""

FORK_SERVER: Final = "fork_server_child"
COLUMNS: Final = (
    *("fault", "good requests", "failed before the first byte", "failed in stream"),
    *("sent again", "longest gap, s", "ready again after, s"),
)


@dataclass
class Seen:
    """The answers that clients got during a fault."""

    good: int = 0
    before: list[str] = field(default_factory=list)
    in_stream: list[str] = field(default_factory=list)
    again: int = 0
    gap_s: float = 0.0
    ready_s: float | None = None
    """None if all were ready all the time."""


@dataclass
class World:
    """The fleet, and what it uses."""

    fleet: Fleet
    redis: Redis
    disk: Path | None
    """A small disk with the media store; None if this user cannot mount one."""

    file_id: str
    aborts: int
    has_engines: bool

    def frontend(self) -> Node:
        return self.fleet.running_frontends[0]

    def worker(self) -> Node:
        return self.fleet.running_workers[0]

    def begin_worker(self, address: str) -> None:
        begin = self.fleet.begin_worker if self.has_engines else self.fleet.begin_modelless_worker
        begin(address=address)


Fault = Callable[[World], Awaitable[None]]


class Traffic:
    """Good requests of one tenant, at a steady rate, through all frontends that run."""

    def __init__(self, world: World, seen: Seen, *, per_s: float = RATE) -> None:
        self._world = world
        self._seen = seen
        self._per_s = per_s
        self._seed = random.randrange(1 << 30)
        self._last_s = time.monotonic()
        self._ready = list(world.fleet.urls)
        headers = {"Authorization": f"Bearer {KEYS['alice']}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(timeout=REQUEST_S, headers=headers, limits=limits, verify=False)

    async def run(self, until: asyncio.Event) -> None:
        """Send until then, and wait for all answers."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        probing = asyncio.create_task(self._probe())
        async with self._client, asyncio.TaskGroup() as group:
            number = 0
            while not until.is_set():
                group.create_task(self._one(number))
                number += 1
                await asyncio.sleep(began + number / self._per_s - loop.time())
            probing.cancel()

    async def _probe(self) -> None:
        """Find the frontends that are ready, as a balancer does."""

        async def is_ready(url: str) -> bool:
            try:
                return (await self._client.get(f"{url}/ready", timeout=PROBE_TIMEOUT_S)).status_code == 200
            except httpx.HTTPError:
                return False

        while True:
            urls = self._world.fleet.urls
            answers = await asyncio.gather(*map(is_ready, urls))
            self._ready = [url for url, ready in zip(urls, answers, strict=True) if ready] or urls
            await asyncio.sleep(PROBE_S)

    async def _one(self, number: int) -> None:
        body = self._body(number)
        try:
            async with asyncio.timeout(REQUEST_S):
                failure, has_begun = await self._send(body, number)
        except TimeoutError:
            failure, has_begun = f"no answer within {REQUEST_S:g} s", False
        if failure is None:
            now = time.monotonic()
            self._seen.gap_s = max(self._seen.gap_s, now - self._last_s)
            self._last_s = now
            self._seen.good += 1
        else:
            (self._seen.in_stream if has_begun else self._seen.before).append(f"{number % 5}: {failure}")

    async def _send(self, body: dict[str, Any], number: int) -> tuple[str | None, bool]:
        """Return what went wrong, and whether the answer had begun."""
        for attempt in range(SENT_AGAIN):
            urls = self._ready
            has_begun = False
            try:
                async with self._client.stream(
                    "POST", urls[(number + attempt) % len(urls)] + CHAT, json=body
                ) as response:
                    text = ""
                    async for piece in response.aiter_text():
                        has_begun = response.status_code == 200
                        text += piece
            except httpx.TransportError as error:
                if has_begun:
                    return repr(error), True
                self._seen.again += 1
                await asyncio.sleep(0.1)
                continue
            if response.status_code != 200:
                return f"{response.status_code} {text[:300]}", False
            if body.get("stream") and ('"error"' in text or not text.rstrip().endswith("[DONE]")):
                return text[-300:], '"content"' in text
            return None, True
        return f"no connection after {SENT_AGAIN} tries", False

    def _body(self, number: int) -> dict[str, Any]:
        content: Any = f"What is {number}?"
        fields: dict[str, Any] = {"max_tokens": 4}
        match number % 5:
            case 1:
                content = [image_url(draw_images(1, seed=self._seed + number)[0]), {"type": "text", "text": "What?"}]
            case 2:
                part = {"type": "file", "file": {"file_id": self._world.file_id}}
                content = [part, {"type": "text", "text": f"What is {number}?"}]
            case 3:
                schema = SCHEMA | {"title": f"t{number % 20}"}
                fields = {"max_tokens": 12}
                fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
            case 4:
                fields = {"max_tokens": STREAM_TOKENS, "stream": True, "ignore_eos": True}
        return {"messages": [{"role": "user", "content": content}], "temperature": 0.0, **fields}


def family(node: Node) -> list[psutil.Process]:
    """Return a node's process and all that came of it."""
    parent = psutil.Process(node.process.pid)
    return [parent, *parent.children(recursive=True)]


def processes_of(node: Node, text: str) -> list[psutil.Process]:
    """Return those below a node whose name or command has some text."""
    found = []
    for one in family(node)[1:]:
        with contextlib.suppress(psutil.Error):
            if text in one.name() or text in " ".join(one.cmdline()):
                found.append(one)
    assert found, f"{node.name} has no process {text!r}: {[one.cmdline() for one in family(node)]}"
    return found


def template(world: World) -> psutil.Process:
    """Return a frontend's fork server; one that was killed is started again only when a process is needed."""
    frontends = [node for node in world.fleet.running_frontends if any(map(is_template, family(node)))]
    return next(filter(is_template, family(frontends[0])))


def is_template(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return FORK_SERVER in " ".join(process.cmdline())
    return False


def pool_process(world: World) -> psutil.Process:
    """Return a preprocessing process that works, which its fork server has forked."""
    return template(world).children()[0]


def grammars(world: World) -> psutil.Process:
    return processes_of(world.worker(), "grammars.child")[0]


def engine_core(world: World) -> psutil.Process:
    return processes_of(world.worker(), "EngineCore")[0]


def killed(which: Callable[[World], psutil.Process]) -> Fault:
    async def fault(world: World) -> None:
        which(world).kill()
        await asyncio.sleep(QUIET_S)

    return fault


def stopped(which: Callable[[World], psutil.Process], seconds: float = STOPPED_S) -> Fault:
    async def fault(world: World) -> None:
        process = which(world)
        process.suspend()
        await asyncio.sleep(seconds)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()

    return fault


def replaced(end: Callable[[World], psutil.Process], number: int = signal.SIGKILL) -> Fault:
    """End a worker, or what it cannot do without; when the worker has ended, another takes its address."""

    async def fault(world: World) -> None:
        worker = world.worker()
        end(world).send_signal(number)
        async with asyncio.timeout(WHOLE_S):
            while worker.is_running:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        world.begin_worker(worker.address)

    return fault


def frontend_ended(number: int) -> Fault:
    async def fault(world: World) -> None:
        frontend = world.frontend()
        frontend.process.send_signal(number)
        await asyncio.to_thread(frontend.process.wait, WHOLE_S)
        world.fleet.begin_frontend(frontend.workers)

    return fault


async def redis_stopped(world: World) -> None:
    world.redis.process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(STOPPED_S)
    world.redis.process.send_signal(signal.SIGCONT)


async def redis_killed(world: World) -> None:
    world.redis.process.kill()
    await asyncio.sleep(STOPPED_S)


async def disk_full(world: World) -> None:
    """Uploads are refused meanwhile, and no chat is."""
    assert world.disk is not None
    filler = world.disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    refused = await asyncio.to_thread(upload, world.frontend().url, os.urandom(1 << 20))
    filler.unlink()
    assert refused.status_code == 503, refused.text
    await asyncio.sleep(QUIET_S)


async def descriptors(world: World) -> None:
    """A frontend can open no file and accept no connection for some seconds; those that wait are taken then."""
    pid = world.frontend().process.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
    await asyncio.sleep(STOPPED_S / 2)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


async def aborts(world: World) -> None:
    """Requests of another tenant that are left within a tenth of a second."""
    room = asyncio.Semaphore(ABORTS_AT_A_TIME)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    headers = {"Authorization": f"Bearer {KEYS['mallory']}"}
    async with httpx.AsyncClient(timeout=60, limits=limits, headers=headers, verify=False) as client:

        async def leave(number: int) -> None:
            body = {"messages": [{"role": "user", "content": f"Count to {number}."}], "max_tokens": 200}
            urls = world.fleet.urls
            async with room:
                with contextlib.suppress(TimeoutError, httpx.HTTPError):
                    async with asyncio.timeout(random.uniform(0.0, 0.1)):
                        await client.post(urls[number % len(urls)] + CHAT, json=body)

        await asyncio.gather(*map(leave, range(world.aborts)))


FAULTS: Final[dict[str, Fault]] = {
    "nothing": lambda _: asyncio.sleep(STOPPED_S),
    "preprocessing process killed": killed(pool_process),
    "preprocessing process stopped for good": stopped(pool_process, 45.0),
    "its template killed": killed(template),
    "its template stopped for 12 s": stopped(template),
    "grammar process killed": killed(grammars),
    "grammar process stopped for 30 s": stopped(grammars, 30.0),
    "Redis stopped for 12 s": redis_stopped,
    "Redis killed for good": redis_killed,
    "media store's disk full": disk_full,
    "a frontend without descriptors for 6 s": descriptors,
    "aborts of another tenant": aborts,
    "a frontend stopped for 12 s": stopped(lambda world: psutil.Process(world.frontend().process.pid)),
    "a frontend killed": frontend_ended(signal.SIGKILL),
    "a frontend drained (SIGTERM)": frontend_ended(signal.SIGTERM),
    "a worker stopped for 12 s": stopped(lambda world: psutil.Process(world.worker().process.pid)),
    "a worker killed": replaced(lambda world: psutil.Process(world.worker().process.pid)),
    "a worker drained (SIGTERM)": replaced(lambda world: psutil.Process(world.worker().process.pid), signal.SIGTERM),
    "engine core killed": replaced(engine_core),
    "engine core stopped for good": replaced(engine_core, signal.SIGSTOP),
}
OF_ENGINES: Final = ("grammar process", "engine core", "Redis")
"""How faults begin for which workers need engines."""

ELSEWHERE: Final = {
    "clock jumps": "`tests/store/test_clock.py` (a clock that is passed in)",
    "supervisor stopped, log unread, log disk full": "`tests/serve/test_unread_logs.py`",
}


def is_whole(fleet: Fleet) -> bool:
    """Return whether two frontends are ready, with two workers each."""
    try:
        return len(fleet.running_frontends) == 2 and all(
            httpx.get(f"{node.url}/ready", timeout=5, verify=False).status_code == 200
            and sum_of(node.metrics(), WORKER_CONNECTED.name) == 2
            for node in fleet.running_frontends
        )
    except httpx.HTTPError:
        return False


async def watch(world: World, seen: Seen, over: asyncio.Event) -> None:
    """Note when the fleet is whole again, and wait for that once the fault is over."""
    began, was_whole = time.monotonic(), True
    while True:
        whole = await asyncio.to_thread(is_whole, world.fleet)
        if whole and not was_whole:
            seen.ready_s = time.monotonic() - began
        was_whole = whole
        if over.is_set() and whole:
            return
        assert time.monotonic() - began < 2 * WHOLE_S, [node.tail() for node in world.fleet.running]
        await asyncio.sleep(0.25)


async def run(world: World, fault: Fault) -> Seen:
    """Good requests before, during and after a fault."""
    seen, end, over = Seen(), asyncio.Event(), asyncio.Event()
    traffic = asyncio.create_task(Traffic(world, seen).run(end))
    await asyncio.sleep(QUIET_S)
    watching = asyncio.create_task(watch(world, seen, over))
    await fault(world)
    over.set()
    await watching
    await asyncio.sleep(QUIET_S)
    end.set()
    await traffic
    return seen


def upload(url: str, data: bytes) -> httpx.Response:
    headers = {"Authorization": f"Bearer {KEYS['alice']}"}
    return httpx.post(
        f"{url}/v1/files",
        data={"purpose": "vision"},
        files={"file": ("image.png", data)},
        headers=headers,
        timeout=60,
        verify=False,
    )


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """A folder on a small disk of its own, if this user can mount one."""
    folder.mkdir(mode=0o700)
    options = f"size={DISK_BYTES},mode=0700"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=False, capture_output=True)
    try:
        yield folder if mounted.returncode == 0 else None
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "--lazy", folder], check=True)


@contextlib.contextmanager
def running(home: Path, aborts: int, *, has_engines: bool) -> Iterator[World]:
    """The world, up and with a stored file."""
    keys = home / "api-keys"
    keys.touch(mode=0o600)
    keys.write_text("".join(f"{tenant} {key}\n" for tenant, key in KEYS.items()))
    model = build("qwen2-vl", home / "model")
    with running_redis(home) as redis, small_disk(home / "media") as disk:
        worker_flags = (*restart_flags(redis.url), "--engine-progress-s", str(PROGRESS_S))
        frontend_flags = ("--media-store", str(home / "media" / "store"), "--api-keys-file", str(keys), *DRAIN)
        with running_fleet(
            model, frontends=2, worker_flags=worker_flags, frontend_flags=frontend_flags, has_engines=has_engines
        ) as fleet:
            stored = upload(fleet.urls[0], draw_images(1, seed=99)[0])
            assert stored.status_code == 200, stored.text
            yield World(fleet, redis, disk, stored.json()["id"], aborts, has_engines)


def table(world: World, names: list[str]) -> bool:
    """Print a row for each fault; whether a request failed before its first byte."""
    has_failed = False
    _row(*COLUMNS)
    _row(*("---" for _ in COLUMNS))
    for name in names:
        if name.startswith(OF_ENGINES) and not world.has_engines:
            continue
        if FAULTS[name] is disk_full and world.disk is None:
            _row(name, "not run: mounting a disk needs root", *[""] * 5)
            continue
        seen = asyncio.run(run(world, FAULTS[name]))
        has_failed |= bool(seen.before)
        ready = "was all the time" if seen.ready_s is None else f"{seen.ready_s:.1f}"
        title = f"{world.aborts:,} {name}" if FAULTS[name] is aborts else name
        _row(title, seen.good, len(seen.before), len(seen.in_stream), seen.again, f"{seen.gap_s:.1f}", ready)
        for failure in (*seen.before[:5], *seen.in_stream[:2]):
            sys.stderr.write(f"  {failure}\n")
    for name, where in ELSEWHERE.items():
        _row(name, where, *[""] * 5)
    return has_failed


def _row(*values: object) -> None:
    sys.stdout.write(f"| {' | '.join(map(str, values))} |\n")
    sys.stdout.flush()


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser("scripts/faults", description=__doc__)
    parser.add_argument("--brief", action="store_true", help="workers without engines, and fewer aborts")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="faults whose names begin so")
    parser.add_argument("--aborts", type=int, help="how many; 10,000 unless --brief")
    options = parser.parse_args()
    names = [name for name in FAULTS if name.startswith(tuple(options.only or [""]))]
    if not names:
        parser.error(f"there is no such fault; these are: {', '.join(FAULTS)}")
    count = options.aborts or (200 if options.brief else 10_000)
    with (
        tempfile.TemporaryDirectory(prefix="semel-faults-") as home,
        running(Path(home), count, has_engines=not options.brief) as world,
    ):
        return int(table(world, names))


if __name__ == "__main__":
    sys.exit(main())
