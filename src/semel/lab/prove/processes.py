"""A fleet of real processes on this machine: workers with their engines, frontends, and how they are ended or killed.

Every process leads a group of its own in the session of whoever started it. All files that it makes lie in one folder.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from semel.core import Key
from semel.lab.bench.ports import free_port
from semel.lab.bench.serving.procfs import descendants, words_of
from semel.settings.secrets import create_key
from semel.telemetry.metrics import WORKER_CONNECTED
from semel.telemetry.scrape import Scrape

__all__ = [
    "CACHED_ITEMS",
    "ENGINE_FLAGS",
    "ENGINE_FOLDER",
    "ENGINE_START_S",
    "ENVIRONMENT",
    "FEATURE_BYTES",
    "FRONTEND_START_S",
    "ITEM_CACHE_GB",
    "SEMEL",
    "VLLM",
    "Fleet",
    "Node",
    "running_fleet",
]

ENGINE_START_S: Final = 600.0
FRONTEND_START_S: Final = 300.0
_END_S: Final = 30.0
_ABORT_S: Final = 1.0
_METRICS_S: Final = 30.0
_POLL_S: Final = 0.05
ENVIRONMENT: Final[Mapping[str, str]] = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONFAULTHANDLER": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
ENGINE_FOLDER: Final = "engine"
"""Of a fleet's home: where vLLM puts its own sockets, and leaves them."""

ENGINE_FLAGS: Final = (
    *("--enforce-eager", "--dtype", "float32", "--max-model-len", "4096", "--seed", "0"),
    *("--max-logprobs", "5"),
)

FEATURE_BYTES: Final = 16 * 1_176 + 3 * 8
"""Of an image of 56×56 pixels: 16 patches in bytes, and the grid that they make."""

CACHED_ITEMS: Final = 44
"""How many of them an engine's item cache holds."""

SEMEL: Final = (sys.executable, "-m", "semel")
VLLM: Final = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
"""vLLM's own server. The command `vllm serve` needs a distribution of the name vllm, and on CPUs it is vllm-cpu."""

ITEM_CACHE_GB: Final = (CACHED_ITEMS + 0.5) * FEATURE_BYTES / 2**30


@dataclass(frozen=True)
class Node:
    """One process of the fleet, with those that it started."""

    name: str
    process: subprocess.Popen[bytes]
    url: str
    """Of a frontend its API, of a worker its admin address."""

    log: Path
    address: str = ""
    """Where a worker listens."""

    workers: tuple[str, ...] = ()
    """Where a frontend finds its workers."""

    metrics_url: str = ""
    """Where a frontend has its metrics, if clients need a key."""

    @property
    def is_running(self) -> bool:
        """Return whether it has not ended."""
        return self.process.poll() is None

    def metrics(self, timeout_s: float = _METRICS_S) -> str:
        """Return its metrics in Prometheus' text."""
        return _get(f"{self.metrics_url or self.url}/metrics", timeout_s)[1]

    def is_up(self, path: str, *, timeout_s: float = 10.0) -> bool:
        """Return whether it answers there with 200."""
        try:
            return _get(f"{self.url}{path}", timeout_s)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def until_up(self, path: str, within_s: float) -> None:
        """Wait until it answers there; fails at once if it ends instead."""

        def is_up() -> bool:
            assert self.is_running, f"{self.name} has ended: {self.tail()}"
            return self.is_up(path)

        _until(is_up, within_s)

    def is_connected_to(self, count: int) -> bool:
        """Return whether a frontend has at least so many workers."""
        return Scrape.parse(self.metrics()).total(WORKER_CONNECTED) >= count

    def tail(self) -> str:
        """Return the end of its log."""
        return self.log.read_text(errors="replace")[-3_000:]

    def family(self) -> list[int]:
        """Return the process and all that came of it."""
        return descendants(self.process.pid)

    def kill(self) -> list[int]:
        """End it in an instant, as a machine does that runs out of memory; what it was. The rest has to end with it."""
        family = self.family()
        self.process.kill()
        self.process.wait(_END_S)
        return family

    def end(self) -> None:
        """Ask it to end, and wait."""
        if self.is_running:
            family = self.family()
            self.process.terminate()
            self.until_ended(family)

    def until_ended(self, family: Iterable[int]) -> None:
        """Wait for one that was asked to end, once: asked again it would end at once, and leave its sockets behind.

        Whoever does not end says in its log where its threads are and is killed, and that is a failure.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
        deadline = time.monotonic() + _END_S
        while (alive := _alive(family)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        words = [" ".join(words_of(pid)[:4]) for pid in alive]
        for number in (signal.SIGABRT, signal.SIGKILL) if alive else ():
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(_ABORT_S)
        self.process.wait(_END_S)
        assert not alive, f"{self.name} did not end within {_END_S:g} s, there are {words}: {self.tail()}"


@dataclass
class Fleet:
    """Workers and frontends that serve one model."""

    model: Path
    home: Path
    key: Key
    admin_key: str
    worker_flags: tuple[str, ...] = ()
    """Of every worker that is started."""

    transport: str = "ipc"
    """How workers listen, unless they are told an address: over tcp all that is sent is encrypted."""

    frontend_flags: tuple[str, ...] = ()
    """Of every frontend that is started. With API keys in them, metrics have a port of their own."""

    engine_flags: tuple[str, ...] = ENGINE_FLAGS
    """Of every engine that is started."""

    key_dir: Path | None = None
    """With a folder of each role's keys, of `semel key make`; else all have the fleet key."""

    workers: list[Node] = field(default_factory=list)
    frontends: list[Node] = field(default_factory=list)

    @property
    def running_frontends(self) -> list[Node]:
        """The frontends that have not ended."""
        return [frontend for frontend in self.frontends if frontend.is_running]

    @property
    def running_workers(self) -> list[Node]:
        """The workers that have not ended."""
        return [worker for worker in self.workers if worker.is_running]

    @property
    def urls(self) -> list[str]:
        """Of the frontends that are running."""
        return [frontend.url for frontend in self.running_frontends]

    @property
    def addresses(self) -> list[str]:
        """Of all workers that were started."""
        return [worker.address for worker in self.workers]

    @property
    def running(self) -> list[Node]:
        """All that have not ended."""
        return [*self.running_frontends, *self.running_workers]

    def begin_worker(self, *, cache_gb: float = ITEM_CACHE_GB, address: str | None = None) -> Node:
        """Start a worker; its engine takes half a minute to come up."""
        name, port = f"worker-{len(self.workers)}", free_port()
        address = address or self.address_of(name)
        command = ["worker", self.model, "--listen", address, *self._keys("worker")]
        command += ["--admin-port", port, "--admin-key-file", self.home / "admin-key", *self.engine_flags]
        command += ["--drain-delay-s", 0]
        command += ["--mm-processor-cache-gb", f"{cache_gb:.9f}", *self.worker_flags]
        core = len(self.workers) % (os.cpu_count() or 1)
        process, log = self._start(name, command, {"VLLM_CPU_OMP_THREADS_BIND": str(core)})
        worker = Node(name, process, f"http://127.0.0.1:{port}", log, address)
        self.workers.append(worker)
        return worker

    def begin_door(self, *, cache_gb: float = ITEM_CACHE_GB, variables: Mapping[str, str] | None = None) -> Node:
        """Start vLLM's own server with semel inside it, which makes it a worker too."""
        name, port = f"worker-{len(self.workers)}", free_port()
        address = self.address_of(name)
        command = ["--model", self.model, "--host", "127.0.0.1", "--port", port, *ENGINE_FLAGS]
        command += ["--mm-processor-cache-gb", f"{cache_gb:.9f}", "--shutdown-timeout", int(_END_S / 2)]
        door = {"SEMEL": "1", "SEMEL_LISTEN": address, "SEMEL_FLEET_KEY_FILE": str(self.home / "key")}
        process, log = self._start(name, command, {**door, **(variables or {})}, VLLM)
        self.workers.append(Node(name, process, f"http://127.0.0.1:{port}", log, address))
        return self.workers[-1]

    def begin_modelless_worker(self, *flags: object, rate: float = 500.0, address: str | None = None) -> Node:
        """Start a worker whose engine has no model, and makes so many tokens a second."""
        name, port = f"worker-{len(self.workers)}", free_port()
        address = address or self.address_of(name)
        command = ["testing", "worker", self.model, "--listen", address, *self._keys("worker")]
        command += ["--admin-port", port, "--drain-delay-s", 0, "--rate", rate, *flags]
        process, log = self._start(name, command, {})
        self.workers.append(Node(name, process, f"http://127.0.0.1:{port}", log, address))
        return self.workers[-1]

    def begin_frontend(
        self,
        addresses: Sequence[str],
        *,
        cache: str = "shared",
        cache_gb: float = 0.25,
        processes: int = 1,
        semel: Sequence[str] = SEMEL,
    ) -> Node:
        """Start a frontend for the workers that listen at these addresses."""
        name, port = f"frontend-{len(self.frontends)}", free_port()
        command = [
            "frontend",
            self.model,
            *self._keys("frontend"),
            "--port",
            port,
            "--preprocessing-processes",
            processes,
        ]
        command += ["--drain-delay-s", 0, "--feature-cache", cache, "--feature-cache-gb", cache_gb]
        for address in addresses:
            command += ["--worker", address]
        metrics_port = free_port()
        if self.frontend_flags:
            command += [*self.frontend_flags, "--metrics-port", metrics_port]
        metrics_url = f"http://127.0.0.1:{metrics_port}" if self.frontend_flags else ""
        process, log = self._start(name, command, {}, semel)
        frontend = Node(name, process, f"http://127.0.0.1:{port}", log, "", tuple(addresses), metrics_url)
        self.frontends.append(frontend)
        return frontend

    def until_up(self) -> None:
        """Wait until all that run answer, and every frontend that runs is connected to all its workers that do."""
        for worker in self.running_workers:
            worker.until_up("/health", ENGINE_START_S)
        for frontend in self.running_frontends:
            frontend.until_up("/ready", FRONTEND_START_S)
            there = sum(worker.address in frontend.workers for worker in self.running_workers)
            _until(partial(frontend.is_connected_to, there), FRONTEND_START_S)

    def reset(self) -> None:
        """Clear the caches of all workers and all frontends."""
        for worker in self.running_workers:
            headers = {"Authorization": f"Bearer {self.admin_key}"}
            status, text = _get(f"{worker.url}/v1/mm_cache/reset", 60.0, "POST", headers)
            assert status == 200, text

    def end(self) -> None:
        """End all that run, at the same time."""
        running = [(node, node.family()) for node in self.running]
        for node, _ in running:
            node.process.terminate()
        for node, family in running:
            node.until_ended(family)

    def _keys(self, role: str) -> tuple[object, ...]:
        if self.key_dir is not None:
            return ("--key-dir", self.key_dir / role)
        return ("--fleet-key-file", self.home / "key")

    def address_of(self, name: str) -> str:
        """Where a new worker listens."""
        return f"tcp://127.0.0.1:{free_port()}" if self.transport == "tcp" else f"ipc://{self.home}/{name}.sock"

    def _start(
        self, name: str, command: Sequence[object], environment: dict[str, str], semel: Sequence[str] = SEMEL
    ) -> tuple[subprocess.Popen[bytes], Path]:
        log = self.home / f"{name}.log"
        engine = self.home / ENGINE_FOLDER
        engine.mkdir(exist_ok=True)
        env = os.environ | ENVIRONMENT | environment | {"TMPDIR": str(engine), "VLLM_RPC_BASE_PATH": str(engine)}
        with log.open("wb") as output:
            words = [*semel, *map(str, command)]
            return subprocess.Popen(words, stdout=output, stderr=output, env=env, process_group=0), log  # noqa: S603


@contextmanager
def running_fleet(
    model: Path,
    *,
    workers: int = 2,
    frontends: int = 3,
    cache: str = "shared",
    item_cache_gb: float = ITEM_CACHE_GB,
    worker_flags: Sequence[str] = (),
    frontend_flags: Sequence[str] = (),
    transport: str = "ipc",
    has_engines: bool = True,
) -> Iterator[Fleet]:
    """A fleet, up and connected; all of it is ended at the end, whatever happens."""
    home = Path(tempfile.mkdtemp(prefix="semel-fleet-"))
    admin_key = secrets.token_hex(16)
    (home / "admin-key").touch(mode=0o600)
    (home / "admin-key").write_text(admin_key)
    fleet = Fleet(
        model, home, create_key(home / "key"), admin_key, tuple(worker_flags), transport, tuple(frontend_flags)
    )
    try:
        for _ in range(workers):
            fleet.begin_worker(cache_gb=item_cache_gb) if has_engines else fleet.begin_modelless_worker()
        fleet.until_up()
        for _ in range(frontends):
            fleet.begin_frontend(fleet.addresses, cache=cache)
        fleet.until_up()
        yield fleet
    finally:
        try:
            fleet.end()
        finally:
            shutil.rmtree(home)


def _get(url: str, timeout_s: float, method: str = "GET", headers: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Return the status and the text of an answer."""
    address = urlsplit(url)
    assert address.hostname is not None
    with contextlib.closing(
        http.client.HTTPConnection(address.hostname, address.port, timeout=timeout_s)
    ) as connection:
        connection.request(method, address.path, headers=dict(headers or {}))
        response = connection.getresponse()
        return response.status, response.read().decode()


def _alive(pids: Iterable[int]) -> list[int]:
    """Return those that have not ended; a process that is done and not waited for has no words."""
    return [pid for pid in pids if any(words_of(pid))]


def _until(condition: Callable[[], bool], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {within_s:g} s"
        time.sleep(_POLL_S)
