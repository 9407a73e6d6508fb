"""S23: whoever takes over a process that decodes has what is left to it, and that is next to nothing.

Each try is made in a real pool process in its sandbox, and has to be refused; and in one without, where the same try by
the same user has to succeed. Without that control, a refusal would show nothing.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from semel.cache import SharedCache
from semel.cache.shared.segment import Segment
from semel.core import Digest, Feature, Layout, Media, Target, Tensor
from semel.errors import ConfigError, ServiceError
from semel.processing.pool import command as command_module
from semel.processing.pool import fork_server as fork_server_module
from semel.processing.pool.pool import Pool
from semel.processing.pool.staging import Staging
from semel.processing.sandbox import LAYERS, kernel_sandbox

ROOT = Path(__file__).parents[2]
CHILD = "tests.security.captured_child"
SECRET = b"the fleet key of this test"
VARIABLE = "SEMEL_TEST_API_KEY"

whole = pytest.mark.skipif(not kernel_sandbox().is_whole, reason=f"this kernel has {kernel_sandbox()}")
"""A kernel without the layers has nothing to show; that semel says so is shown without it."""


@asynccontextmanager
async def captured_pool(
    folder: Path,
    layers: Sequence[str],
    processes: int = 1,
    *,
    requires_sandbox: bool = False,
    memory: SharedCache | None = None,
) -> AsyncIterator[Pool]:
    """A pool as shipped, but for who sits in its processes, and the layers around them."""
    _write_config(folder, layers)
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server_module, "_PROGRAM", CHILD)
        patch.setenv("PYTHONPATH", paths)
        patch.setenv(VARIABLE, SECRET.decode())
        if not layers:
            patch.setattr(command_module, "child_environment", dict)
        pool = await Pool.start(
            folder,
            Target("float32"),
            processes=processes,
            spares=0,
            timeout_s=20,
            requires_sandbox=requires_sandbox,
            memory=memory,
        )
    try:
        yield pool
    finally:
        await pool.close()


def _write_config(folder: Path, layers: Sequence[str]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"layers": list(layers)}))


@pytest.fixture(scope="module")
async def captured(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pool]:
    async with captured_pool(tmp_path_factory.mktemp("captured"), LAYERS, processes=2) as pool:
        yield pool


@pytest.fixture(scope="module")
async def control(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pool]:
    async with captured_pool(tmp_path_factory.mktemp("control"), (), processes=2) as pool:
        yield pool


async def attempt(pool: Pool, name: str, arguments: dict[str, Any]) -> tuple[bool, str]:
    """Whether a try succeeded in a process of the pool, and what it got or why not."""
    made = await pool.process(Media("image", json.dumps([name, arguments]).encode()), apart=True)
    found, got, _ = msgspec.json.decode(made.tensors["got"].data.tobytes())
    return found, got


@dataclass
class Scene:
    """What there is to attack."""

    folder: Path
    port: int
    datagrams: int
    socket_path: str
    victim: int
    """Another process of the same user."""

    secret_address: int
    """Where this process has the key in its memory."""


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    (tmp_path / "key").write_bytes(SECRET)
    (tmp_path / "key").chmod(0o600)
    secret = ctypes.create_string_buffer(SECRET)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
        socket.socket(socket.AF_UNIX) as local,
        _sleeping() as victim,
    ):
        datagrams.bind(("127.0.0.1", 0))
        local.bind(str(tmp_path / "socket"))
        local.listen()
        numbers = server.getsockname()[1], datagrams.getsockname()[1]
        yield Scene(tmp_path, *numbers, str(tmp_path / "socket"), victim, ctypes.addressof(secret))
        Path(f"/dev/shm/semel-test-{victim}").unlink(missing_ok=True)


@contextmanager
def _sleeping() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"]) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def _key(scene: Scene) -> dict[str, Any]:
    return {"path": str(scene.folder / "key")}


def _new(scene: Scene) -> dict[str, Any]:
    return {"path": str(scene.folder / "new")}


def _parent_memory(scene: Scene) -> dict[str, Any]:
    return {"pid": os.getpid(), "address": scene.secret_address, "nbytes": len(SECRET)}


def _parent(_: Scene) -> dict[str, Any]:
    return {"pid": os.getpid()}


def _victim(scene: Scene) -> dict[str, Any]:
    return {"pid": scene.victim}


def _nothing(_: Scene) -> dict[str, Any]:
    return {}


TRIES: dict[str, tuple[str, Callable[[Scene], dict[str, Any]]]] = {
    "read the key file": ("read_file", _key),
    "read /etc/passwd": ("read_file", lambda _: {"path": "/etc/passwd"}),
    "list the folder of the keys": ("list_folder", lambda scene: {"path": str(scene.folder)}),
    "find a key in its environment": ("find_variable", lambda _: {"name": VARIABLE}),
    "read the parent's environment": ("read_environment", _parent),
    "read the parent's memory as a file": ("read_memory_file", _parent_memory),
    "read the parent's memory": ("read_memory", _parent_memory),
    "trace another process": ("trace", _victim),
    "signal the parent": ("send_signal", _parent),
    "have the kernel signal the parent": ("own_signals", _parent),
    "slow the parent down": ("slow_down", _parent),
    "connect by TCP": ("connect", lambda scene: {"port": scene.port}),
    "send a datagram": ("send_datagram", lambda scene: {"port": scene.datagrams}),
    "connect to a local socket": ("connect_locally", lambda scene: {"path": scene.socket_path}),
    "listen": ("listen", _nothing),
    "fork": ("fork", _nothing),
    "start a program": ("spawn", _nothing),
    "create a file": ("create", _new),
    "create a file in shared memory": ("create", lambda scene: {"path": f"/dev/shm/semel-test-{scene.victim}"}),
    "overwrite a file": ("overwrite", _key),
    "truncate a file": ("truncate", _key),
    "remove a file": ("remove", _key),
    "rename a file": ("rename", _key),
    "make a folder": ("make_folder", _new),
    "make a link": ("make_link", _new),
    "change a mode": ("change_mode", _key),
    "change times": ("change_times", _key),
    "make memory that no limit counts": ("make_memory", _nothing),
    "share memory that no limit counts": ("share_memory", _nothing),
    "raise its limit of memory": ("raise_limit", _nothing),
}


@whole
@pytest.mark.parametrize("title", TRIES)
async def test_a_try_from_inside_the_sandbox_is_refused_and_succeeds_without_it_S23(
    title: str, captured: Pool, control: Pool, scene: Scene
) -> None:
    name, arguments_of = TRIES[title]
    arguments = arguments_of(scene)
    succeeded, why = await attempt(captured, name, arguments)
    assert not succeeded, f"got {why}"
    assert (scene.folder / "key").read_bytes() == SECRET
    succeeded, got = await attempt(control, name, arguments)
    if name in {"read_memory", "read_memory_file", "trace"} and _yama():
        return  # this machine refuses it to everybody
    assert succeeded, f"the control shows nothing: {got}"
    if name.startswith("read_memory"):
        assert bytes.fromhex(got) == SECRET


def _yama() -> bool:
    path = Path("/proc/sys/kernel/yama/ptrace_scope")
    return path.exists() and path.read_text().strip() != "0"


@whole
async def test_another_program_in_its_place_is_refused_and_runs_without_the_sandbox_S23(
    captured: Pool, tmp_path: Path
) -> None:
    marker = tmp_path / "ran"
    succeeded, _ = await attempt(captured, "execute", {"marker": str(marker)})
    assert not succeeded
    assert not marker.exists()
    async with captured_pool(tmp_path / "model", ()) as control:
        with pytest.raises(ServiceError):  # the program that took its place does not answer
            await attempt(control, "execute", {"marker": str(marker)})
    assert marker.exists()


@whole
@pytest.mark.parametrize("name", ["read_memory", "read_memory_file"])
async def test_the_memory_of_another_pool_process_is_refused_and_can_be_read_without_the_sandbox_S23(
    name: str, captured: Pool, control: Pool
) -> None:
    """It has another tenant's media in it."""
    for pool, may in ((captured, False), (control, True)):
        outcomes = {await _tries_sibling(pool, name, pid) for pid in pool.pids for _ in range(4)}
        if not _yama():
            assert (True in outcomes) is may


async def _tries_sibling(pool: Pool, name: str, pid: int) -> bool:
    """Whoever takes the item tries it; a process may read its own memory, which shows nothing."""
    arguments = {"pid": pid, "address": _heap(pid), "nbytes": 8}
    made = await pool.process(Media("image", json.dumps([name, arguments]).encode()), apart=True)
    succeeded, _, who = msgspec.json.decode(made.tensors["got"].data.tobytes())
    return bool(succeeded) and who != pid


def _heap(pid: int) -> int:
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return int(next(line for line in maps if "[heap]" in line).split("-")[0], 16)


async def check_features_stay(folder: Path, layers: Sequence[str]) -> None:
    """A process fills all memory that it has; a feature of another tenant is then what it was."""
    memory = SharedCache.create(4 << 20)
    try:
        data = b"a feature of another tenant".ljust(64, b".")
        feature = Feature("image", {"pixels": Tensor("uint8", (64,), memoryview(data))}, Layout((7,) * 4))
        kept = memory.put(Digest(bytes(32)), feature, tenant="globex")
        async with captured_pool(folder, layers, memory=memory) as pool:
            assert (await attempt(pool, "overwrite_memory", {}))[1] != "0", "it has memory to write to"
            made = await pool.process(Media("image", json.dumps(["list_folder", {"path": "/"}]).encode()))
            assert made.tensors["got"].data.tobytes()[:1] == b"[", "what it makes arrives all the same"
            del made
        assert kept.tensors["pixels"].data.tobytes() == data
    finally:
        memory.close()


async def test_features_cannot_be_changed_by_a_process_that_decodes_S23(tmp_path: Path) -> None:
    """Whatever the kernel has: the segment is not among what a process gets."""
    await check_features_stay(tmp_path / "sandboxed", LAYERS)
    await check_features_stay(tmp_path / "free", ())


async def test_control_a_process_that_writes_into_the_segment_itself_changes_them_S23(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was: the segment of features was what each process got."""
    segments: list[Segment] = []
    create = SharedCache.create

    def remember(capacity: int) -> SharedCache:
        made = create(capacity)
        segments.append(made.segment)
        return made

    monkeypatch.setattr(SharedCache, "create", remember)
    monkeypatch.setattr(Staging, "create", lambda: Staging(segments[-1]))
    monkeypatch.setattr(Staging, "close", lambda _: None)
    with pytest.raises(AssertionError, match="a feature o"):
        await check_features_stay(tmp_path / "model", LAYERS)


@whole
async def test_the_segment_cannot_be_opened_through_the_parent_and_can_without_the_sandbox_S23(
    captured: Pool, control: Pool
) -> None:
    memory = SharedCache.create(1 << 20)
    try:
        path = {"path": f"/proc/{os.getpid()}/fd/{memory.segment.fileno()}"}
        assert not (await attempt(captured, "overwrite", path))[0]
        assert memory.segment.memory[:1] == b"\0"
        assert (await attempt(control, "overwrite", path))[0] or _yama()
    finally:
        memory.close()


@whole
async def test_no_core_is_dumped_S23(captured: Pool) -> None:
    assert not (await attempt(captured, "dump_core", {}))[0]


@whole
@pytest.mark.parametrize(
    ("missing", "title"),
    [("landlock", "read the key file"), ("landlock", "read the parent's environment"), ("seccomp", "fork")],
)
async def test_mutant_without_a_layer_the_try_succeeds_S23(
    missing: str, title: str, tmp_path: Path, scene: Scene
) -> None:
    name, arguments_of = TRIES[title]
    async with captured_pool(tmp_path / "model", [layer for layer in LAYERS if layer != missing]) as pool:
        assert (await attempt(pool, name, arguments_of(scene)))[0]
        assert pool.sandboxed == {layer: int(layer != missing) for layer in LAYERS}


@whole
async def test_each_layer_is_counted_S23(captured: Pool, control: Pool) -> None:
    assert captured.sandboxed == dict.fromkeys(LAYERS, 2)
    assert control.sandboxed == dict.fromkeys(LAYERS, 0)


@whole
async def test_a_pool_that_requires_a_sandbox_without_a_layer_does_not_start_S23(tmp_path: Path) -> None:
    async with captured_pool(tmp_path / "whole", LAYERS, requires_sandbox=True):
        pass
    with pytest.raises(ConfigError, match="--require-sandbox"):
        async with captured_pool(tmp_path / "lacking", LAYERS[:-1], requires_sandbox=True):
            pass
