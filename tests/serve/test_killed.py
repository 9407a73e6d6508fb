"""`kill -9` of a worker, a frontend or `semel serve` at ten moments each: nothing of theirs is left after ten seconds.

A moment is an event: a line of the log, a process that appears, an answer. CI runs what needs no engine; there an
engine's own processes are killed in `tests/fleet/test_fleet.py`. The file of an `ipc://` address that an operator names
is not looked at: it stays until another worker takes its place.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from semel.lab.bench.ports import free_port
from semel.settings.secrets import create_key
from tests.conftest import Folder
from tests.serve.served import FLAGS, SEMEL, sum_of, until
from tests.serve.test_draining import CHAT, picture

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(420)]

LEFT_S = 10.0
START_S = 300.0
MARK = "SEMEL_TEST_FAMILY"
FORK_SERVER = "fork_server_child"
ENGINE = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
POLL_S = 0.01


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
            return answers(f"{self.url}{path}")

        until(is_ready, START_S, every_s=0.2)

    def files(self, segments: Iterable[str]) -> list[Path]:
        """Sockets, the folder with the key of a run, and these segments: what of them is there."""
        folders = [one for folder in self.home.glob("semel-*") for one in (folder, *folder.rglob("*"))]
        sockets = [one for one in self.home.rglob("*") if one.is_socket()]
        return [*folders, *sockets, *(Path(name) for name in segments if Path(name).exists())]

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
        names = {f"{one.pid} {command_of(one)[:120]}" for one in left()}
        print(f"{len(family)} processes, {len(segments)} segments: {time.monotonic() - killed:.1f} s")  # noqa: T201
        assert not names, names
        while (files := self.files(segments)) and time.monotonic() - killed < LEFT_S:
            time.sleep(0.2)
        assert not files, files
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


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return "has ended now"


@contextmanager
def started(home: Path, port: int, *command: object, output: int | None = None) -> Iterator[Started]:
    """A command of semel; what it prints goes to its log, unless there is another place."""
    mark, log = secrets.token_hex(8), home / "command.log"
    environment = os.environ | ENGINE | {"TMPDIR": str(home), MARK: mark}
    with log.open("wb") as file:
        printed = file.fileno() if output is None else output
        process = subprocess.Popen(
            [SEMEL, *map(str, command)], stdout=printed, stderr=printed, env=environment, process_group=0
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


Moment = Callable[["Started", str], AbstractContextManager[None]]
"""What is waited for, given a command and where clients reach it, and what goes on while the command is killed."""


def event(has_come: Callable[[Started], bool]) -> Moment:
    @contextmanager
    def moment(one: Started, _: str) -> Iterator[None]:
        def is_so() -> bool:
            assert one.process.poll() is None, one.log.read_text(errors="replace")[-3_000:]
            return has_come(one)

        until(is_so, START_S, every_s=POLL_S)
        yield

    return moment


def line(text: str) -> Moment:
    """The log has some text."""
    return event(lambda one: text in one.log.read_text(errors="replace"))


def process(text: str) -> Moment:
    """A process appears, below the command or with its mark."""
    return event(lambda one: any(text in command_of(child) for child in one.family()))


def ready(path: str) -> Moment:
    return event(lambda one: answers(f"{one.url}{path}"))


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def until_served(url: str) -> None:
    until(lambda: answers(f"{url}/ready"), START_S, every_s=0.1)


def body_of(content: object = "Count.", **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": content}], "ignore_eos": True, **fields}


@contextmanager
def answered(_: Started, url: str) -> Iterator[None]:
    """A request with an image has been answered."""
    until_served(url)
    body = body_of([picture(0), {"type": "text", "text": "?"}], max_tokens=2)
    reply = httpx.post(f"{url}{CHAT}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    yield


@contextmanager
def streaming(_: Started, url: str) -> Iterator[None]:
    """A stream has begun, and has long to go."""
    until_served(url)
    body = body_of(stream=True, max_tokens=2_000)
    with httpx.stream("POST", f"{url}{CHAT}", json=body, timeout=60) as response:
        assert response.status_code == 200
        next(response.iter_lines())
        yield


@contextmanager
def draining(one: Started, url: str) -> Iterator[None]:
    """It has been asked to end, and has a stream to end first."""
    with streaming(one, url):
        one.process.terminate()
        until(lambda: "have, within" in one.log.read_text(errors="replace"), START_S)
        yield


@contextmanager
def preprocessing(one: Started, url: str) -> Iterator[None]:
    """All pool processes have work, and none of them moves."""
    until_served(url)
    for child in pool_processes(one):
        child.suspend()
    body = body_of([picture(1), {"type": "text", "text": "?"}], max_tokens=2)
    with ThreadPoolExecutor() as threads:
        asking = threads.submit(httpx.post, f"{url}{CHAT}", json=body, timeout=60)
        until(lambda: in_flight(url) == 1, START_S)
        yield
        assert isinstance(asking.exception(60), httpx.HTTPError)


def in_flight(url: str) -> float:
    return sum_of(httpx.get(f"{url}/metrics", timeout=5).text, "semel_requests_in_flight")


def pool_processes(one: Started) -> list[psutil.Process]:
    """Those that its template has forked."""
    below = psutil.Process(one.process.pid).children()
    return [child for template in below if FORK_SERVER in command_of(template) for child in template.children()]


STARTED: dict[str, Moment] = {"started": event(lambda _: True)}
ENGINE_MOMENTS: dict[str, Moment] = {
    "importing vLLM": line("semel.compose.worker: importing vLLM"),
    "configuring the engine": line("Resolved architecture"),
    "engine core spawned": process("spawn_main"),
    "engine core begun": process("VLLM::EngineCore"),
    "loading weights": line("Starting to load model"),
    "cache made": line("KV cache size"),
}
SERVED_MOMENTS: dict[str, Moment] = {"answered": answered, "streaming": streaming, "draining": draining}
WORKER_MOMENTS = STARTED | ENGINE_MOMENTS | {"ready": ready("/health"), "streaming": streaming, "draining": draining}
SERVE_MOMENTS = (
    STARTED
    | {"children started": process("semel frontend"), "template started": process(FORK_SERVER)}
    | ENGINE_MOMENTS
    | SERVED_MOMENTS
)
FRONTEND_MOMENTS = (
    STARTED
    | {
        "listening": line("Started server process"),
        "template started": process(FORK_SERVER),
        "pool process forked": event(lambda one: bool(pool_processes(one))),
        "waiting for a worker": line("waiting for the worker"),
        "connected": line("serving "),
        "ready": ready("/ready"),
        "preprocessing": preprocessing,
    }
    | SERVED_MOMENTS
)
LATE_WORKER = ("started", "listening", "template started", "pool process forked", "waiting for a worker")
"""Moments of a frontend for which there is no worker yet."""


def worker_command(home: Path, port: int, model: Path, *command: str) -> Sequence[object]:
    create_key(home / "key")
    address = f"tcp://127.0.0.1:{free_port()}"
    flags = ("--drain-delay-s", 0, "--admin-port", port)
    return (*command, model, "--listen", address, "--fleet-key-file", home / "key", *flags)


@contextmanager
def frontend_of(home: Path, model: Path, worker: Sequence[object], processes: int = 1) -> Iterator[Started]:
    """A frontend of a worker that runs, or will."""
    own, port = home / "frontend", free_port()
    own.mkdir()
    address = worker[worker.index("--listen") + 1]
    flags = ("--fleet-key-file", home / "key", "--port", port, "--preprocessing-processes", processes)
    with started(own, port, "frontend", model, "--worker", address, "--drain-delay-s", 0, *flags) as frontend:
        yield frontend


def moments(known: Mapping[str, Moment], *, in_ci: Sequence[str] = ()) -> pytest.MarkDecorator:
    marks = [pytest.param(name, marks=() if name in in_ci else pytest.mark.nightly) for name in known]
    return pytest.mark.parametrize("moment", marks)


@pytest.mark.engine
@moments(WORKER_MOMENTS)
def test_a_worker_that_is_killed_leaves_no_engine(moment: str, tiny: Folder, home: Path) -> None:
    model, port = tiny("qwen2-vl"), free_port()
    command = worker_command(home, port, model, "worker")
    with started(home, port, *command, *FLAGS) as worker:
        if moment not in SERVED_MOMENTS:
            with WORKER_MOMENTS[moment](worker, ""):
                worker.kill()
            return
        worker.until_ready("/health")
        with frontend_of(home, model, command) as frontend, WORKER_MOMENTS[moment](worker, frontend.url):
            worker.kill()


@pytest.mark.engine
@moments(SERVE_MOMENTS)
def test_a_serve_that_is_killed_leaves_nothing(moment: str, tiny: Folder, home: Path) -> None:
    port = free_port()
    flags = ("--port", port, "--preprocessing-processes", "1", *FLAGS)
    with started(home, port, "serve", tiny("qwen2-vl"), *flags) as serve, SERVE_MOMENTS[moment](serve, serve.url):
        serve.kill()


@pytest.mark.parametrize("moment", ["started", "ready"])
def test_a_worker_without_a_model_that_is_killed_leaves_nothing(moment: str, tiny: Folder, home: Path) -> None:
    port = free_port()
    command = worker_command(home, port, tiny("qwen2-vl"), "testing", "worker")
    with started(home, port, *command) as worker, WORKER_MOMENTS[moment](worker, ""):
        worker.kill()


@pytest.mark.parametrize("moment", ["template started", "streaming"])
def test_a_serve_without_a_model_that_is_killed_leaves_nothing(moment: str, tiny: Folder, home: Path) -> None:
    port = free_port()
    flags = ("--port", port, "--preprocessing-processes", "2", "--drain-s", "2")
    with (
        started(home, port, "testing", "serve", tiny("qwen2-vl"), *flags) as serve,
        SERVE_MOMENTS[moment](serve, serve.url),
    ):
        serve.kill()


@moments(FRONTEND_MOMENTS, in_ci=("template started", "streaming"))
def test_a_frontend_that_is_killed_leaves_nothing(moment: str, tiny: Folder, home: Path) -> None:
    """Its template and its pool processes are children of nobody then, some of them in the middle of an import."""
    model, admin = tiny("qwen2-vl"), free_port()
    command = worker_command(home, admin, model, "testing", "worker")
    with ExitStack() as stack:
        if moment not in LATE_WORKER:
            stack.enter_context(started(home, admin, *command)).until_ready("/health")
        frontend = stack.enter_context(frontend_of(home, model, command, processes=2))
        with FRONTEND_MOMENTS[moment](frontend, frontend.url):
            frontend.kill()
