"""The two servers that are compared: started here on one model with the same flags, or running elsewhere.

All processes that are started here are in one session. They wait for requests without using a processor, so an idle
side does not disturb the other. Their files and logs are in one scratch folder. They are ended in every case,
even after an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from semel.cli.start_log import StartLog
from semel.errors import ConfigError
from semel.lab.bench.ports import free_port
from semel.lab.bench.serving.client import Client
from semel.lab.bench.serving.procfs import descendants, words_of
from semel.lab.bench.serving.socket_bytes import FOLDER_VARIABLE
from semel.vllm_plugin.levels import parse_levels

__all__ = [
    "ROLES",
    "Launch",
    "Server",
    "door_server",
    "end_process",
    "more_frontends",
    "role_of",
    "semel_server",
    "storing_frontend",
    "vllm_again",
    "vllm_server",
    "vllm_with_two_frontends",
]

_START_S: Final = 1_800.0  # a large model takes long to load
_END_S: Final = 30.0
_POLL_S: Final = 0.25
_TAIL_CHARS: Final = 3_000
_PYTHON: Final = (sys.executable, "-m")
ROLES: Final = ("frontend", "worker", "engine core", "engine worker")
"""What the processes of a server do, in the order in which a request meets them."""

_ENGINE_ROLES: Final = {"VLLM::Engine": "engine core", "VLLM::Worker": "engine worker"}
_COUNTING: Final = (*_PYTHON, "semel.lab.bench.serving.socket_bytes")


@dataclass(frozen=True, slots=True)
class Launch:
    """The start of both sides: the same model with the same flags."""

    model: str
    flags: tuple[str, ...]
    scratch: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    screen_options: Mapping[str, object] = field(default_factory=dict)
    """The `mm_processor_kwargs` of an agent's requests, so that its screens fit the context."""

    semel_flags: tuple[str, ...] = ()
    """Of semel's side alone."""

    python: str | None = None
    """The interpreter of another checkout of semel, if two of them are compared."""

    tcp_port: int = 0
    """Where semel's worker listens on 127.0.0.1, encrypted; 0 if it is reached over ipc."""

    @property
    def key_file(self) -> Path:
        """The fleet key of semel's side."""
        return self.scratch / "key"

    @property
    def worker_address(self) -> str:
        """Return where semel's worker listens, once it does."""
        if self.tcp_port:
            return f"tcp://127.0.0.1:{self.tcp_port}"
        (path,) = (self.scratch / "semel").glob("semel-*/worker.sock")
        return f"ipc://{path}"


@dataclass(frozen=True, slots=True)
class Server:
    """One server, and its processes if it was started here."""

    urls: tuple[str, ...]
    """The URLs of its frontends: one, unless they have addresses of their own."""

    roots: tuple[int, ...] = ()
    """The processes that were started; all others are their descendants."""

    counts: Path | None = None
    """The folder in which its frontends count the bytes that they send, if they do."""

    admin_url: str | None = None
    """The URL of its worker's metrics, if it has a worker that was started here."""

    log: Path | None = None
    """What it printed, if it was started here."""

    has_supervisor: bool = True
    """Whether the processes that were started only start others, as `semel serve` does."""

    @property
    def url(self) -> str:
        """The URL of its first frontend."""
        return self.urls[0]

    @property
    def is_here(self) -> bool:
        """Return whether its processes can be inspected."""
        return bool(self.roots)

    def pids(self) -> list[int]:
        """Return all its processes."""
        return [pid for root in self.roots for pid in descendants(root)]

    def roles(self) -> dict[str, list[int]]:
        """Return its processes by what they do: frontend, worker, engine core, engine worker, other."""
        roles: dict[str, list[int]] = {}
        for pid in self.pids():
            is_root = self.has_supervisor and pid in self.roots
            roles.setdefault(role_of(words_of(pid), is_root=is_root), []).append(pid)
        if "frontend" not in roles:  # vLLM's own server: the process that was started
            roles["frontend"] = list(self.roots)
            roles["other"] = [pid for pid in roles.get("other", ()) if pid not in self.roots]
        return roles

    def serving_pids(self) -> list[int]:
        """Return all its processes but vLLM's engine."""
        engine = _ENGINE_ROLES.values()
        return [pid for role, members in self.roles().items() if role not in engine for pid in members]

    def frontend_pids(self) -> list[int]:
        """Return its HTTP processes: children for semel, the started process for vLLM."""
        return [pid for pid in self.pids() if "frontend" in words_of(pid)] or list(self.roots)


def role_of(words: Sequence[str], *, is_root: bool = False) -> str:
    """Return what a process does, by its command line. vLLM's processes name themselves."""
    first = words[0] if words else ""
    for name, role in _ENGINE_ROLES.items():
        if first.startswith(name):
            return role
    if not is_root:
        for role in ("frontend", "worker"):
            if role in words:
                return role
    return "other"


@asynccontextmanager
async def semel_server(launch: Launch) -> AsyncIterator[Server]:
    """`semel serve`, ready; over tcp a worker and a frontend of their own, as on two machines."""
    await _make_key(launch.key_file)
    if launch.tcp_port:
        async with _semel_over_tcp(launch) as server:
            yield server
        return
    python = _PYTHON if launch.python is None else (launch.python, "-m")
    command = [*python, "semel", "serve", launch.model, "--fleet-key-file", str(launch.key_file)]
    command += ["--admin-port", str(admin_port := free_port())]
    async with _started(launch, "semel", [*command, *launch.flags, *launch.semel_flags], ready="/ready") as server:
        yield replace(server, admin_url=f"http://127.0.0.1:{admin_port}")


@asynccontextmanager
async def _semel_over_tcp(launch: Launch) -> AsyncIterator[Server]:
    worker = [*_PYTHON, "semel", "worker", launch.model, "--listen", launch.worker_address, "--drain-delay-s", "0"]
    worker += ["--fleet-key-file", str(launch.key_file), *launch.flags, *launch.semel_flags]
    frontend = [*_PYTHON, "semel", "frontend", launch.model, "--worker", launch.worker_address]
    frontend += ["--fleet-key-file", str(launch.key_file), "--drain-delay-s", "0"]
    async with (
        _started(launch, "worker", worker, ready="/health", bind=("--metrics-host", "--admin-port")) as engine,
        _started(launch, "semel", frontend, ready="/ready") as server,
    ):
        roots = (*server.roots, *engine.roots)
        yield replace(server, roots=roots, admin_url=engine.url, has_supervisor=False)


@asynccontextmanager
async def vllm_server(launch: Launch, name: str = "vllm") -> AsyncIterator[Server]:
    """vLLM's own server, ready, with its render routes."""
    command = [*_PYTHON, "vllm.entrypoints.openai.api_server", "--enable-scale-out", "--model", launch.model]
    command += ["--trust-request-mm-kwargs"] if launch.screen_options else []
    async with _started(launch, name, [*command, *launch.flags], ready="/health") as server:
        yield server


@asynccontextmanager
async def door_server(launch: Launch, levels: str) -> AsyncIterator[Server]:
    """The same with these levels of semel inside, all of them on."""
    inside = replace(launch, environment={**launch.environment, "SEMEL": levels})
    async with vllm_server(inside, "door") as server:
        assert server.log is not None
        _check_door(server.log.read_text(errors="replace"), levels)
        yield server


def _check_door(log: str, levels: str) -> None:
    """Raise `ConfigError` if the door's line, the first of its lines in a log, is missing or says that one is off."""
    line = next((line for line in log.splitlines() if "semel: " in line), "")
    if not line or "the door stays shut" in line:
        raise ConfigError(f"vLLM's server runs without semel: {line or 'its log has no line of the door'}")
    _, _, off = line.partition("; off: ")
    for level in parse_levels(levels):
        if level != "worker" and re.search(rf"(^|, ){level} \(", off):  # no frontend asks it, so it has no address
            raise ConfigError(f"--door measures the level {level}, which is off: {line}")


@asynccontextmanager
async def vllm_again(launch: Launch) -> AsyncIterator[Server]:
    """vLLM's own server once more. Its log tells what each step encodes."""
    command = [*_PYTHON, "vllm.entrypoints.openai.api_server", "--enable-logging-iteration-details", "--model"]
    async with _started(launch, "vllm-again", [*command, launch.model, *launch.flags], ready="/health") as server:
        yield server


@asynccontextmanager
async def vllm_with_two_frontends(launch: Launch) -> AsyncIterator[Server]:
    """The same with two API servers behind one address, which count the bytes that they send."""
    command = [*_COUNTING, "vllm", "serve", launch.model, "--api-server-count", "2", *launch.flags]
    async with _started(launch, "vllm-2", command, ready="/health") as server:
        yield server


@asynccontextmanager
async def more_frontends(launch: Launch, count: int) -> AsyncIterator[Server]:
    """More frontends for the worker of a `semel serve`, each with its own address. They count the bytes they send."""
    command = [*_COUNTING, "semel", "frontend", launch.model, "--worker", launch.worker_address]
    command += ["--fleet-key-file", str(launch.key_file), "--preprocessing-processes", "1", "--drain-delay-s", "0"]
    async with AsyncExitStack() as stack:
        starting = [_started(launch, f"semel-{number}", command, ready="/ready") for number in range(count)]
        servers = [await stack.enter_async_context(one) for one in starting]
        urls = tuple(server.url for server in servers)
        roots = tuple(root for server in servers for root in server.roots)
        yield Server(urls, roots, servers[0].counts)


@asynccontextmanager
async def storing_frontend(launch: Launch) -> AsyncIterator[Server]:
    """Another frontend for the worker of a `semel serve`, which stores responses; so no other figure has a store."""
    command = [*_PYTHON, "semel", "frontend", launch.model, "--worker", launch.worker_address, "--drain-delay-s", "0"]
    command += ["--fleet-key-file", str(launch.key_file)]
    command += ["--media-store", str(launch.scratch / "media"), "--store-responses"]
    async with _started(launch, "responses", command, ready="/ready") as server:
        yield server


async def _make_key(path: Path) -> None:
    making = await asyncio.create_subprocess_exec(*_PYTHON, "semel", "key", str(path), stdout=subprocess.DEVNULL)
    if await making.wait():
        raise ConfigError(f"cannot make a fleet key at {path}; the message is above")


@asynccontextmanager
async def _started(
    launch: Launch, name: str, command: Sequence[str], *, ready: str, bind: tuple[str, str] = ("--host", "--port")
) -> AsyncIterator[Server]:
    """A server, ready. `bind` are the flags of its address and its port."""
    home, counts = launch.scratch / name, launch.scratch / f"{name.partition('-')[0]}-counts"
    home.mkdir()
    counts.mkdir(exist_ok=True)
    port, log = free_port(), home / "log"
    folders = {"TMPDIR": str(home), "VLLM_RPC_BASE_PATH": str(home), FOLDER_VARIABLE: str(counts)}
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: ASYNC220, S603 (uvloop's own knows no process group)
            [*command, bind[0], "127.0.0.1", bind[1], str(port)],
            env=os.environ | {"SEMEL": "0"} | dict(launch.environment) | folders,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,  # not a session: sessions are scheduling groups of their own, and starve each other
        )
    url = f"http://127.0.0.1:{port}"
    try:
        await _until_up(url, ready, process, log)
        yield Server((url,), (process.pid,), counts, log=log)
    finally:
        await end_process(process)


async def _until_up(url: str, path: str, process: subprocess.Popen[bytes], log: Path) -> None:
    loop = asyncio.get_running_loop()
    until = loop.time() + _START_S
    async with Client(url) as client:
        while not await client.is_up(path):
            if process.poll() is not None:
                raise ConfigError(f"a server could not start (exit code {process.returncode}): {_tail(log)}")
            if loop.time() > until:
                raise ConfigError(f"a server was not ready within {_START_S:g} s: {_tail(log)}")
            await asyncio.sleep(_POLL_S)


def _tail(log: Path) -> str:
    """Return the cause of a failed start, and the end of its log."""
    printed, read = log.read_bytes(), StartLog()
    read.feed(printed + b"\n")
    return f"{read.cause}\n{printed[-_TAIL_CHARS:].decode(errors='replace')}"


async def end_process(process: subprocess.Popen[bytes]) -> None:
    """Terminate it, then kill what is left of its descendants, even if this task is cancelled meanwhile."""
    family = descendants(process.pid)
    process.terminate()
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, _END_S)
    finally:
        for pid in family:
            if "resource_tracker" not in " ".join(words_of(pid)):  # it ends by itself, and frees what others left
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        process.wait(_END_S)
