"""A fleet of real processes on this machine: workers with their engines, frontends, and how they are ended or killed.

Every process leads a group of its own in the session of whoever started it. All files that it makes lie in one folder.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx
import psutil

from semel.core import Key
from semel.lab.bench.ports import free_port
from semel.settings.secrets import create_key
from semel.telemetry.metrics import WORKER_CONNECTED
from tests.serve.served import FLAGS, SEMEL, sum_of, until

ENGINE_START_S = 600.0
FRONTEND_START_S = 300.0
END_S = 30.0
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
ENGINE_FOLDER = "engine"
"""Of a fleet's home: where vLLM puts its own sockets, and leaves them."""

ENGINE_FLAGS = (*FLAGS, "--max-logprobs", "5")

FEATURE_BYTES = 16 * 1_176 + 3 * 8
"""Of an image of 56×56 pixels: 16 patches in bytes, and the grid that they make."""

ITEMS_HELD = 44
"""How many of them an engine's item cache holds."""

ROOT = Path(__file__).parents[2]

VLLM = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
"""vLLM's own server. The command `vllm serve` needs a distribution of the name vllm, and on CPUs it is vllm-cpu."""

ITEM_CACHE_GB = (ITEMS_HELD + 0.5) * FEATURE_BYTES / 2**30


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
        return self.process.poll() is None

    def metrics(self) -> str:
        return httpx.get(f"{self.metrics_url or self.url}/metrics", timeout=30, verify=False).text

    def until_up(self, path: str, within_s: float) -> None:
        """Wait until it answers there; fails at once if it ends instead."""

        def is_up() -> bool:
            assert self.is_running, f"{self.name} has ended: {self.tail()}"
            try:
                return self._get(path, timeout_s=10).status_code == 200
            except httpx.TransportError:
                return False

        until(is_up, within_s)

    def _get(self, path: str, *, timeout_s: float) -> httpx.Response:
        # Certificates are for nothing here, and loading them is what a request would spend most of its time with.
        return httpx.get(f"{self.url}{path}", timeout=timeout_s, verify=False)

    def is_connected_to(self, count: int) -> bool:
        """Whether a frontend has at least so many workers."""
        return sum_of(self.metrics(), WORKER_CONNECTED.name) >= count

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3_000:]

    def family(self) -> list[psutil.Process]:
        """The process and all that came of it."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def kill(self) -> list[psutil.Process]:
        """End it in an instant, as a machine does that runs out of memory; what it was. The rest has to end with it."""
        family = self.family()
        self.process.kill()
        self.process.wait(END_S)
        return family

    def end(self) -> None:
        """Ask it to end, and wait."""
        if self.is_running:
            family = self.family()
            self.process.terminate()
            self.until_ended(family)

    def until_ended(self, family: list[psutil.Process]) -> None:
        """Wait for one that was asked to end, once: asked again it would end at once, and leave its sockets behind.

        Whoever does not end is killed, and that is a failure.
        """
        _, alive = psutil.wait_procs(family, timeout=END_S)
        for process in alive:
            process.kill()
        self.process.wait(END_S)
        assert not alive, f"{self.name} did not end within {END_S:g} s: {self.tail()}"


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

    workers: list[Node] = field(default_factory=list)
    frontends: list[Node] = field(default_factory=list)

    @property
    def running_frontends(self) -> list[Node]:
        return [frontend for frontend in self.frontends if frontend.is_running]

    @property
    def running_workers(self) -> list[Node]:
        return [worker for worker in self.workers if worker.is_running]

    @property
    def urls(self) -> list[str]:
        """Of the frontends that are running."""
        return [frontend.url for frontend in self.running_frontends]

    @property
    def addresses(self) -> list[str]:
        return [worker.address for worker in self.workers]

    @property
    def running(self) -> list[Node]:
        return [*self.running_frontends, *self.running_workers]

    def begin_worker(self, *, cache_gb: float = ITEM_CACHE_GB, address: str | None = None) -> Node:
        """Start a worker; its engine takes half a minute to come up."""
        name, port = f"worker-{len(self.workers)}", free_port()
        address = address or self.address_of(name)
        command = ["worker", self.model, "--listen", address, "--fleet-key-file", self.home / "key"]
        command += ["--admin-port", port, "--admin-key-file", self.home / "admin-key", *ENGINE_FLAGS]
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
        command += ["--mm-processor-cache-gb", f"{cache_gb:.9f}", "--shutdown-timeout", int(END_S / 2)]
        door = {"SEMEL": "1", "SEMEL_LISTEN": address, "SEMEL_FLEET_KEY_FILE": str(self.home / "key")}
        process, log = self._start(name, command, {**door, **(variables or {})}, VLLM)
        self.workers.append(Node(name, process, f"http://127.0.0.1:{port}", log, address))
        return self.workers[-1]

    def begin_modelless_worker(self, *, rate: float = 500.0, address: str | None = None) -> Node:
        """Start a worker whose engine has no model, and makes so many tokens a second."""
        name, port = f"worker-{len(self.workers)}", free_port()
        address = address or self.address_of(name)
        command = ["testing", "worker", self.model, "--listen", address, "--fleet-key-file", self.home / "key"]
        command += ["--admin-port", port, "--drain-delay-s", 0, "--rate", rate]
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
        semel: Sequence[str] = (str(SEMEL),),
    ) -> Node:
        """Start a frontend for the workers that listen at these addresses."""
        name, port = f"frontend-{len(self.frontends)}", free_port()
        command = [
            "frontend",
            self.model,
            "--fleet-key-file",
            self.home / "key",
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
            until(partial(frontend.is_connected_to, there), FRONTEND_START_S)

    def reset(self) -> None:
        """Clear the caches of all workers and all frontends."""
        for worker in self.running_workers:
            headers = {"Authorization": f"Bearer {self.admin_key}"}
            reply = httpx.post(f"{worker.url}/v1/mm_cache/reset", headers=headers, timeout=60)
            assert reply.status_code == 200, reply.text

    def end(self) -> None:
        """End all that run, at the same time."""
        running = [(node, node.family()) for node in self.running]
        for node, _ in running:
            node.process.terminate()
        for node, family in running:
            node.until_ended(family)

    def address_of(self, name: str) -> str:
        """Where a new worker listens."""
        return f"tcp://127.0.0.1:{free_port()}" if self.transport == "tcp" else f"ipc://{self.home}/{name}.sock"

    def _start(
        self, name: str, command: Sequence[object], environment: dict[str, str], semel: Sequence[str] = (str(SEMEL),)
    ) -> tuple[subprocess.Popen[bytes], Path]:
        log = self.home / f"{name}.log"
        engine = self.home / ENGINE_FOLDER
        engine.mkdir(exist_ok=True)
        env = os.environ | ENVIRONMENT | environment | {"TMPDIR": str(engine), "VLLM_RPC_BASE_PATH": str(engine)}
        with log.open("wb") as output:
            words = [*semel, *map(str, command)]
            return subprocess.Popen(words, stdout=output, stderr=output, env=env, process_group=0, cwd=ROOT), log


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
