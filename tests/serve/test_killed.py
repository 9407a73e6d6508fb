"""`kill -9` of a worker, a frontend or `semel serve`: nothing of theirs is left, from the first second of their start.

The seconds after a start are the moments; `None` is when it is ready, with a stream under way. CI runs what needs no
engine; there an engine's own processes are killed in `tests/fleet/test_fleet.py`.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from semel.bench.ports import free_port
from semel.settings import create_key
from tests.conftest import Folder
from tests.serve.served import FLAGS, SEMEL, until

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(420)]

LEFT_S = 10.0
START_S = 300.0
MARK = "SEMEL_TEST_FAMILY"
ENGINE = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
ENGINE_MOMENTS = (0.3, 1.0, 2.0, 4.0, 7.0, 10.0, 14.0, 18.0, 24.0, None)
MOMENTS = (0.2, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0, None)
IN_CI = (1.0, None)


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short name: sockets of vLLM have to fit."""
    return tmp_path_factory.mktemp("k")


@dataclass(frozen=True)
class Started:
    """A command of semel, with what finds all that came of it."""

    process: subprocess.Popen[bytes]
    mark: str
    home: Path
    log: Path
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def family(self) -> set[psutil.Process]:
        """Its descendants, and those that have its mark in their environment, though somebody else is their parent."""
        found = set(psutil.Process(self.process.pid).children(recursive=True)) if self.process.poll() is None else set()
        for one in psutil.process_iter():
            try:
                environment = Path(f"/proc/{one.pid}/environ").read_bytes()
            except OSError:
                continue
            if self.mark.encode() in environment:
                found.add(one)
        return found

    def until_ready(self, path: str) -> None:
        def is_ready() -> bool:
            assert self.process.poll() is None, self.log.read_text(errors="replace")[-3_000:]
            try:
                return httpx.get(f"{self.url}{path}", timeout=5).status_code == 200
            except httpx.HTTPError:
                return False

        until(is_ready, START_S, every_s=0.2)

    def kill(self) -> None:
        """Kill it alone, and see that everything else ends by itself."""
        family, segments = self.family(), set[str]()
        for one in family:
            segments |= segments_of(one.pid)
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(LEFT_S)
        killed = time.monotonic()

        def left() -> list[psutil.Process]:
            family.update(self.family())
            return [one for one in family if is_alive(one)]

        while left() and time.monotonic() - killed < LEFT_S:
            time.sleep(0.2)
        names = {f"{one.pid} {shown(one)}" for one in left()}
        print(f"{len(family)} processes, {len(segments)} segments: {time.monotonic() - killed:.1f} s")  # noqa: T201
        assert not names, names
        until(lambda: not [name for name in segments if Path(name).exists()], LEFT_S)
        until(lambda: not [one for one in self.home.rglob("*") if one.is_socket()], LEFT_S)
        until(lambda: not list(self.home.glob("semel-*")), LEFT_S)  # a key of the run is in there
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("127.0.0.1", self.port))


def segments_of(pid: int) -> set[str]:
    """The shared memory with a name that a process has mapped."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    return {name for name in re.findall(r"(/dev/shm/\S+)(?:\n|$)", maps) if Path(name).exists()}


def is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def shown(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:120]
    except psutil.NoSuchProcess:
        return "has ended now"


@contextmanager
def started(home: Path, port: int, *command: object) -> Iterator[Started]:
    mark, log = secrets.token_hex(8), home / "command.log"
    environment = os.environ | ENGINE | {"TMPDIR": str(home), MARK: mark}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [SEMEL, *map(str, command)], stdout=output, stderr=output, env=environment, process_group=0
        )
    one = Started(process, mark, home, log, port)
    try:
        yield one
    finally:
        for left in one.family():
            if is_alive(left):
                left.kill()
        if process.poll() is None:
            process.kill()
        process.wait(LEFT_S)


@contextmanager
def streaming(url: str) -> Iterator[None]:
    """A stream that has begun, and has long to go."""
    body = {"messages": [{"role": "user", "content": "Count."}], "stream": True, "max_tokens": 2_000}
    body |= {"ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as response:
        assert response.status_code == 200
        next(response.iter_lines())
        yield


def kill_at(one: Started, moment_s: float | None, ready: str = "/health") -> None:
    if moment_s is None:
        one.until_ready(ready)
    else:
        time.sleep(moment_s)
        assert one.process.poll() is None, one.log.read_text(errors="replace")[-3_000:]
    one.kill()


def worker_command(home: Path, port: int, model: Path, *command: str) -> Sequence[object]:
    create_key(home / "key")
    address = f"tcp://127.0.0.1:{free_port()}"
    return (*command, model, "--listen", address, "--fleet-key-file", home / "key", "--admin-port", port)


def moments(values: Sequence[float | None]) -> pytest.MarkDecorator:
    marks = [
        pytest.param(value, id=str(value), marks=() if value in IN_CI else pytest.mark.nightly) for value in values
    ]
    return pytest.mark.parametrize("moment_s", marks)


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.parametrize("moment_s", ENGINE_MOMENTS)
def test_a_worker_that_is_killed_leaves_no_engine(moment_s: float | None, tiny: Folder, home: Path) -> None:
    port = free_port()
    command = worker_command(home, port, tiny("qwen2-vl"), "worker")
    with started(home, port, *command, *FLAGS) as worker:
        kill_at(worker, moment_s)


@pytest.mark.engine
@pytest.mark.nightly
@pytest.mark.parametrize("moment_s", ENGINE_MOMENTS)
def test_a_serve_that_is_killed_leaves_nothing(moment_s: float | None, tiny: Folder, home: Path) -> None:
    port = free_port()
    flags = ("--port", port, "--preprocessing-processes", "1", *FLAGS)
    with started(home, port, "serve", tiny("qwen2-vl"), *flags) as serve:
        kill_at(serve, moment_s, "/ready")


@moments(MOMENTS)
def test_a_worker_without_a_model_that_is_killed_leaves_nothing(
    moment_s: float | None, tiny: Folder, home: Path
) -> None:
    port = free_port()
    command = worker_command(home, port, tiny("qwen2-vl"), "testing", "worker")
    with started(home, port, *command) as worker:
        kill_at(worker, moment_s)


@moments(MOMENTS)
def test_a_serve_without_a_model_that_is_killed_leaves_nothing(
    moment_s: float | None, tiny: Folder, home: Path
) -> None:
    port = free_port()
    flags = ("--port", port, "--preprocessing-processes", "2", "--drain-s", "2")
    with started(home, port, "testing", "serve", tiny("qwen2-vl"), *flags) as serve:
        if moment_s is not None:
            kill_at(serve, moment_s)
            return
        serve.until_ready("/ready")
        with streaming(serve.url):
            serve.kill()


@moments(MOMENTS)
def test_a_frontend_that_is_killed_leaves_nothing(moment_s: float | None, tiny: Folder, home: Path) -> None:
    """Its template and its pool processes are children of nobody then, some of them in the middle of an import."""
    model, port, admin = tiny("qwen2-vl"), free_port(), free_port()
    command = worker_command(home, admin, model, "testing", "worker")
    flags = ("--fleet-key-file", home / "key", "--port", port, "--preprocessing-processes", "2")
    with started(home, admin, *command) as worker:
        worker.until_ready("/health")
        address = command[command.index("--listen") + 1]
        own = home / "frontend"
        own.mkdir()
        with started(own, port, "frontend", model, "--worker", address, *flags) as frontend:
            if moment_s is not None:
                kill_at(frontend, moment_s)
                return
            frontend.until_ready("/ready")
            with streaming(frontend.url):
                frontend.kill()
