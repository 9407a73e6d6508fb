"""The fork server of pool processes, with real processes: what it shares, what it refuses, and what its death costs."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from semel.errors import ServiceError
from semel.processing.pool import command as command_module
from semel.processing.pool import fork_server as fork_server_module
from semel.processing.pool.fork_server import LOST_STATUS, ForkedProcess, ForkServer
from semel.processing.pool.preloaded_child import class_names
from semel.processing.pool.process import PoolProcess
from tests.processing.template_program import BALLAST_BYTES
from tests.processing.test_pool import ended
from tests.processing.test_pool_environment import environment_of
from tests.waiting import until

ROOT = Path(__file__).parents[2]
PROGRAM = "tests.processing.template_program"

Making = Callable[..., ForkServer]


@pytest.fixture
async def making(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Making]:
    """A fork server as shipped, of a program that takes no second to import; it is closed in the end."""
    monkeypatch.setattr(fork_server_module, "_PROGRAM", PROGRAM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "src")]))

    def make(*wishes: str) -> ForkServer:
        (tmp_path / "wishes.json").write_text(json.dumps(wishes))
        made.append(ForkServer(tmp_path))
        return made[-1]

    made: list[ForkServer] = []
    yield make
    for fork_server in made:
        await fork_server.close()


@asynccontextmanager
async def forked(fork_server: ForkServer, *words: str) -> AsyncIterator[tuple[ForkedProcess, socket.socket]]:
    """A process, and our end of its pipe; it is ended if it has not."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        async with asyncio.timeout(60):
            process = await fork_server.fork([theirs.fileno()], words)
        assert process is not None
        theirs.close()
        try:
            yield process, ours
        finally:
            process.kill()
            await process.wait()


async def ask(pipe: socket.socket, line: str = "who") -> str:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(pipe, line.encode())
    async with asyncio.timeout(30):
        return (await loop.sock_recv(pipe, 64)).decode()


def memory_of(pid: int) -> dict[str, int]:
    rows = re.findall(r"^(\w+):\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    return {name: int(kib) << 10 for name, kib in rows}


async def test_processes_share_what_their_template_has_imported_S23(making: Making) -> None:
    fork_server = making("load_ballast")
    async with forked(fork_server) as (one, pipe), forked(fork_server) as (other, _):
        assert await ask(pipe) == f"{one.pid} 1"
        assert one.pid != other.pid
        for process in (one, other):
            assert memory_of(process.pid)["Rss"] > BALLAST_BYTES
            assert memory_of(process.pid)["Pss"] < BALLAST_BYTES * 3 // 4
    async with forked(fork_server, "load_ballast") as (one, pipe):
        assert await ask(pipe) == f"{one.pid} 2"
        assert memory_of(one.pid)["Pss"] > BALLAST_BYTES, "the control: what each loads itself is not shared"


async def test_how_a_process_ends_is_noticed_S6(making: Making) -> None:
    fork_server = making()
    for line, status in (("0", 0), ("7", 7), ("crash", -signal.SIGSEGV)):
        async with forked(fork_server) as (process, pipe):
            await asyncio.get_running_loop().sock_sendall(pipe, line.encode())
            async with asyncio.timeout(30):
                assert await process.wait() == status
            assert process.returncode == status
            process.kill()  # of one that has ended, which is nobody's business


async def check_survives_its_template(fork_server: ForkServer) -> None:
    async with forked(fork_server) as (process, pipe):
        await ask(pipe)
        first = fork_server.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: fork_server.pid is None)
        assert await ask(pipe) == f"{process.pid} 0"
        async with forked(fork_server) as (another, other_pipe):
            assert await ask(other_pipe) == f"{another.pid} 0"
            assert fork_server.pid not in (None, first)
        assert another.returncode == -signal.SIGKILL
    assert process.returncode == LOST_STATUS, "nobody could tell"


async def test_processes_survive_their_template_and_the_next_one_comes_from_another_S6(making: Making) -> None:
    await check_survives_its_template(making())


@pytest.mark.slow
async def test_mutant_a_process_that_dies_with_its_template_is_found_S6(making: Making) -> None:
    async def fork(self: ForkServer, descriptors: list[int], words: list[str]) -> ForkedProcess | None:
        return await shipped(self, descriptors, [*words, "die_with_template"])

    shipped = ForkServer.fork
    with pytest.MonkeyPatch.context() as patch, pytest.raises((AssertionError, OSError)):
        patch.setattr(ForkServer, "fork", fork)
        await check_survives_its_template(making())


async def check_nobody_has_the_pipe(fork_server: ForkServer, why: str) -> None:
    """An order that fails leaves no process behind, and the fork server goes on."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        for _ in range(2):
            with pytest.raises(ServiceError, match=why):
                await fork_server.fork([theirs.fileno()], [])
        theirs.close()
        async with asyncio.timeout(10):
            assert await asyncio.get_running_loop().sock_recv(ours, 64) == b""
    assert fork_server.pid is not None


@pytest.mark.parametrize(
    ("wish", "error"), [("fail_to_fork", errno.EAGAIN), ("fail_to_keep", errno.ENFILE)], ids=["fork", "keep"]
)
async def test_a_fork_that_fails_leaves_no_process_at_the_pipe_and_says_why_S6(
    making: Making, wish: str, error: int
) -> None:
    fork_server = making(wish)
    await check_nobody_has_the_pipe(fork_server, f"cannot be forked: {os.strerror(error)}")


@pytest.mark.slow
async def test_mutant_a_template_that_dies_of_a_fork_leaves_the_process_at_the_pipe_S6(making: Making) -> None:
    """Whoever asked would start another process at the same pipe, and each would read half of what is sent."""
    fork_server = making("keep_what_fails")
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        await check_nobody_has_the_pipe(fork_server, "cannot be forked")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        assert await making("keep_what_fails").fork([theirs.fileno()], []) is None
        theirs.close()
        assert (await ask(ours)).endswith(" 0"), "it is there all the same"


@contextmanager
def no_more_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    last = os.dup(0)  # the lowest number that was free
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(last)


async def test_a_process_whose_descriptor_does_not_arrive_is_reported_as_too_many_open_files() -> None:
    """A message has the number of the process then, which is no number of an error."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setblocking(False)
        socket.send_fds(theirs, [b"11"], [theirs.fileno()])
        with no_more_descriptors(), pytest.raises(ServiceError) as caught:
            await ForkedProcess.of(ours)
    assert str(caught.value) == f"a preprocessing process cannot be forked: {os.strerror(errno.EMFILE)}"
    assert os.strerror(11) not in str(caught.value), "as it was"


@pytest.mark.parametrize("wish", ["start_thread", "fail"])
async def test_a_template_with_a_second_thread_or_an_error_does_not_fork_and_is_not_tried_again_S23(
    making: Making, monkeypatch: pytest.MonkeyPatch, wish: str
) -> None:
    fork_server = making(wish)
    assert await fork_server.fork([], []) is None
    monkeypatch.setattr(fork_server_module, "start", None)
    assert await fork_server.fork([], []) is None
    child = await PoolProcess.spawn(1 << 20, fork_server=fork_server)
    assert child.running, "it was started as a program"
    await child.end(within_s=0)
    await child.release()


@pytest.mark.slow
async def test_mutant_a_template_that_does_not_count_its_threads_forks(making: Making) -> None:
    fork_server = making("start_thread", "fork_anyway")
    async with forked(fork_server) as (process, _):
        assert process.returncode is None


def descriptors_of(pid: int) -> set[str]:
    """What a process has open beside standard input, output and error."""
    folder = Path(f"/proc/{pid}/fd")
    return {str(entry.readlink()) for entry in folder.iterdir() if int(entry.name) > 2}


async def descriptors_of_three(fork_server: ForkServer) -> list[set[str]]:
    """Of two processes, each with a pipe and memory, and of their fork server."""
    memory = [os.memfd_create("one"), os.memfd_create("other")]
    pipes = [socket.socketpair(), socket.socketpair()]
    processes = [
        await fork_server.fork([theirs.fileno(), descriptor], [])
        for (_, theirs), descriptor in zip(pipes, memory, strict=True)
    ]
    try:
        for (ours, theirs), process in zip(pipes, processes, strict=True):
            theirs.close()
            ours.setblocking(False)
            assert process is not None
            assert await ask(ours) == f"{process.pid} 0", "it runs its program, and has let go of the rest"
        assert fork_server.pid is not None
        return [descriptors_of(pid) for pid in (*(one.pid for one in processes if one), fork_server.pid)]
    finally:
        for process in processes:
            if process is not None:
                process.kill()
                await process.wait()
        for ours, _ in pipes:
            ours.close()
        for descriptor in memory:
            os.close(descriptor)


async def test_a_process_has_its_own_descriptors_and_the_template_none_of_them_S23(making: Making) -> None:
    fork_server = making()
    one, other, origin = await descriptors_of_three(fork_server)
    assert (len(one), len(other)) == (2, 2)
    assert not one & other
    assert not origin & (one | other)
    assert not [name for name in origin if not name.startswith(("socket:", "anon_inode:[pidfd]", "pidfd:"))]


@pytest.mark.slow
async def test_mutant_a_process_that_keeps_what_the_template_has_is_found_S23(making: Making) -> None:
    fork_server = making("keep_descriptors")
    _, other, origin = await descriptors_of_three(fork_server)
    assert other & origin
    assert len(other) > 2


@pytest.mark.parametrize("passes_all_on", [False, True])
async def test_a_template_has_no_secret_of_the_environment_and_a_mutant_that_gets_all_has_S23(
    making: Making, monkeypatch: pytest.MonkeyPatch, passes_all_on: bool
) -> None:
    monkeypatch.setenv("HF_TOKEN", "a secret")
    if passes_all_on:
        monkeypatch.setattr(command_module, "child_environment", dict)
    fork_server = making()
    async with forked(fork_server) as (process, pipe):
        await ask(pipe)
        assert fork_server.pid is not None
        for pid in (process.pid, fork_server.pid):
            assert ("a secret" in environment_of(pid).values()) is passes_all_on


async def test_after_some_crashes_processes_come_from_another_template_S23(
    making: Making, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forks have the addresses of their fork server, and whoever makes them crash may be about to find them."""
    monkeypatch.setattr(fork_server_module, "_MAX_CRASHES", 2)
    fork_server = making()
    async with forked(fork_server) as (_, pipe):
        await ask(pipe)
        first = fork_server.pid
        fork_server.count_crash()
        assert fork_server.pid == first
        fork_server.count_crash()
        async with forked(fork_server) as (_, other_pipe):
            await ask(other_pipe)
            assert fork_server.pid not in (None, first)
        assert await ask(pipe), "those that there are go on"
    assert first is not None
    assert ended(first), "it ends with the last of them"


@pytest.mark.slow
async def test_a_template_that_hangs_is_ended_and_the_next_try_has_another(
    making: Making, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_server = making()
    async with forked(fork_server) as (_, pipe):
        await ask(pipe)
    hung = fork_server.pid
    assert hung is not None
    os.kill(hung, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(fork_server_module, "_START_TIMEOUT_S", 0.2)
        patch.setattr(fork_server_module, "_END_TIMEOUT_S", 0.2)
        with pytest.raises(ServiceError, match="not forked within"):
            await fork_server.fork([], [])
    assert ended(hung)
    async with forked(fork_server) as (process, pipe):
        assert await ask(pipe) == f"{process.pid} 0"


@pytest.mark.slow
async def test_a_template_that_dies_over_an_order_gets_no_pipe_twice_and_the_next_try_has_another_S6(
    making: Making, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have forked already: two processes at one pipe would each read half of what is sent."""
    fork_server = making()
    sent = fork_server_module._send_order

    def kill_and_send(*arguments: Any) -> socket.socket:
        assert fork_server.pid is not None
        os.kill(fork_server.pid, signal.SIGSTOP)
        status = sent(*arguments)
        os.kill(fork_server.pid, signal.SIGKILL)
        return status

    async with forked(fork_server) as (_, pipe):
        await ask(pipe)
    with monkeypatch.context() as patch:
        patch.setattr(fork_server_module, "_send_order", kill_and_send)
        with pytest.raises(ServiceError, match="died with status -9"):
            await fork_server.fork([], [])
    async with forked(fork_server) as (process, pipe):
        assert await ask(pipe) == f"{process.pid} 0"


PARENT = f"""
import asyncio, socket, sys
from pathlib import Path
from semel.processing.pool import command as command_module
from semel.processing.pool import fork_server as fork_server_module
fork_server_module._PROGRAM = {PROGRAM!r}

async def main():
    fork_server = fork_server_module.ForkServer()
    ours, theirs = socket.socketpair()
    process = await fork_server.fork([theirs.fileno()], [])
    theirs.close()
    print(process.pid, fork_server.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.usefixtures("making")
def test_when_the_pool_s_process_is_killed_the_template_and_what_it_forked_end_S6() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 2
    assert all(map(ended, pids))


def test_the_classes_of_a_model_s_processor_are_found_in_its_files(tmp_path: Path) -> None:
    assert [*class_names(tmp_path)] == []
    (tmp_path / "processor_config.json").write_text(
        '{"processor_class": "AProcessor", "image_processor": {"image_processor_type": "AnImageProcessor", "size": 3}}'
    )
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ATokenizer", "processor_class": 3}')
    (tmp_path / "preprocessor_config.json").write_text("nonsense")
    assert {*class_names(tmp_path)} == {"AProcessor", "AnImageProcessor", "ATokenizer"}
