"""Where workers are: lists, files and names, under a clock that the test turns."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest

from semel.errors import ConfigError
from semel.fleet.discovery import DnsSource, FileSource, WorkerDirectory, addresses_in, check_address, sources_of

A, B, C = (f"tcp://10.0.0.{number}:9000" for number in (1, 2, 3))


class Ticks:
    """A clock: every second that the roster sleeps is one that the test lets pass."""

    def __init__(self) -> None:
        self.passed = 0
        self._seconds: asyncio.Queue[None] = asyncio.Queue()
        self.asleep = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        assert seconds == 1
        self.asleep.set()
        await self._seconds.get()
        self.passed += 1

    async def turn(self, seconds: int = 1) -> None:
        """Let seconds pass, and what happens in each of them happen."""
        for _ in range(seconds):
            async with asyncio.timeout(10):
                await self.asleep.wait()
                self.asleep.clear()
                self._seconds.put_nowait(None)
                await self.asleep.wait()


class Followed:
    """A roster, and the lists that it gave."""

    def __init__(self, roster: WorkerDirectory, ticks: Ticks) -> None:
        self.lists: list[tuple[str, ...]] = []
        self.ticks = ticks
        self._roster = roster

    async def follow(self) -> None:
        async for found in self._roster.lists():
            self.lists.append(found)


@pytest.fixture
async def following() -> AsyncIterator[list[asyncio.Task[None]]]:
    tasks: list[asyncio.Task[None]] = []
    yield tasks
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_fixed_list_is_all_there_is_and_never_changes() -> None:
    roster = WorkerDirectory([A, B])
    assert await roster.open() == (A, B)
    assert [one async for one in roster.lists()] == []


async def test_without_any_worker_the_flags_are_named() -> None:
    with pytest.raises(ConfigError, match="--worker, --worker-file, --worker-dns or --worker-endpoint-slices"):
        await WorkerDirectory([]).open()


@pytest.mark.parametrize(
    "address", ["10.0.0.1:9000", "tcp://10.0.0.1", "tcp://:9000", "tcp://h:0", "tcp://h:99999", "ipc://w"]
)
def test_an_address_that_nobody_can_listen_at_is_refused_by_name(address: str) -> None:
    with pytest.raises(ConfigError, match="a worker listens at") as raised:
        check_address(address)
    assert address in str(raised.value)


def test_a_file_has_comments_blank_lines_and_no_address_twice() -> None:
    text = f"# the fleet\n\n{A}   # rack 1\r\n  ipc:///run/semel/w.sock\n{A}\ntcp://[fd00::1]:9000"
    assert addresses_in(text) == (A, "ipc:///run/semel/w.sock", "tcp://[fd00::1]:9000")


def test_the_line_that_is_wrong_is_named() -> None:
    with pytest.raises(ConfigError, match=r"line 2: .*'worker-7'"):
        addresses_in(f"{A}\nworker-7\n")


async def test_a_file_is_followed_and_a_broken_one_takes_nobody_away(
    tmp_path: Path, following: list[asyncio.Task[None]], caplog: pytest.LogCaptureFixture
) -> None:
    """Control: taking every reading as it is would have emptied the fleet four times."""
    path = tmp_path / "workers"
    path.write_text(f"{A}\n{B}\n")
    ticks = Ticks()
    roster = WorkerDirectory([C], sources_of(path, (), 10), sleep=ticks.sleep)
    assert await roster.open() == (C, A, B)
    followed = Followed(roster, ticks)
    following.append(asyncio.create_task(followed.follow()))
    await ticks.turn()
    assert followed.lists == []
    (tmp_path / "new").write_text(f"{B}\n")
    (tmp_path / "new").rename(path)
    await ticks.turn()
    assert followed.lists == [(C, B)]
    for broken in (b"", b"# nobody\n", f"{B}\ntcp://10.0.0".encode(), b"\xff\xfe\x00"):
        path.write_bytes(broken)
        with pytest.raises(ConfigError):
            await FileSource(path).read()
        await ticks.turn(2)
    path.unlink()
    await ticks.turn(3)
    assert followed.lists == [(C, B)]
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 4, "two of them are broken in the same way, and each way is told once"
    assert all(str(path) in error and "are kept" in error for error in errors)
    path.write_text(f"{A}\n")
    await ticks.turn()
    assert followed.lists == [(C, B), (C, A)]


async def test_a_file_that_is_not_there_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--worker-file .*workers cannot be used: No such file"):
        await WorkerDirectory([], [FileSource(tmp_path / "workers")]).open()


async def test_a_file_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    path.write_bytes(b"#" * (1024**2 + 1))
    with pytest.raises(ConfigError, match="more than 1,048,576 bytes"):
        await FileSource(path).read()


async def test_a_name_is_resolved_every_so_often_and_a_resolver_that_fails_takes_nobody_away(
    following: list[asyncio.Task[None]],
) -> None:
    answers: list[list[str] | OSError] = [
        socket.gaierror("not yet"),
        ["10.0.0.2", "10.0.0.1", "10.0.0.2"],
        TimeoutError(),
        ["10.0.0.1", "fd00::1"],
    ]
    asked: list[tuple[int, str, int]] = []

    async def resolve(name: str, port: int) -> Iterable[str]:
        asked.append((ticks.passed, name, port))
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    ticks = Ticks()
    roster = WorkerDirectory([], [DnsSource("workers.svc", 9000, every_s=5, resolve=resolve)], sleep=ticks.sleep)
    assert await roster.open() == (), "names may appear later"
    followed = Followed(roster, ticks)
    following.append(asyncio.create_task(followed.follow()))
    await ticks.turn(16)
    assert asked == [(at, "workers.svc", 9000) for at in (0, 5, 10, 15)]
    assert followed.lists == [(A, B), (A, "tcp://[fd00::1]:9000")]


async def test_the_resolver_of_the_system_is_asked() -> None:
    assert await DnsSource.parse("127.0.0.1:9000").read() == ["tcp://127.0.0.1:9000"]


@pytest.mark.parametrize("text", ["workers", "workers:", ":9000", "workers:http"])
def test_a_name_without_a_port_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--worker-dns takes NAME:PORT"):
        DnsSource.parse(text)
