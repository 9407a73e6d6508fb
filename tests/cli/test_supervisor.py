"""Children that are kept running: also when they cannot be started for a while, and never without anybody knowing."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from semel.cli import serve, supervisor
from semel.cli.serve import ServeOptions
from semel.cli.supervisor import Child, ending
from semel.errors import ConfigError, ServiceError
from semel.settings.frontend import ServerSettings, ServingSettings
from semel.settings.serve import ServeSettings
from tests.waiting import until

AT_ONCE = ServeSettings("m", serving=ServingSettings(server=ServerSettings(drain_s=0)))
SHORT = ["/bin/sh", "-c", "exit 3"]
LONG = ["/bin/sh", "-c", "exec sleep 600"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_MIN_PAUSE_S", 0.01)
    monkeypatch.setattr(supervisor, "_MAX_PAUSE_S", 0.05)


def program(path: Path, text: str) -> list[str]:
    """A command that can be taken away."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return [str(path)]


@asynccontextmanager
async def kept(child: Child) -> AsyncIterator[asyncio.Task[None]]:
    keeper = asyncio.create_task(child.keep())
    try:
        yield keeper
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        await child.end(5)


class Spawn:
    """`create_subprocess_exec` on a machine that has nothing left, from the second call on, so many times."""

    def __init__(self, number: int, times: int) -> None:
        self.calls = 0
        self._number, self._times = number, times
        self._real = asyncio.create_subprocess_exec

    async def __call__(self, *command: str, **options: Any) -> asyncio.subprocess.Process:
        self.calls += 1
        if 1 < self.calls <= 1 + self._times:
            raise OSError(self._number, os.strerror(self._number))
        return await self._real(*command, **options)


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EAGAIN, errno.EMFILE])
async def test_a_restart_that_fails_is_tried_again_and_told(
    number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The wrong implementation caught nothing: the keeper ended, and nobody looked at it."""
    spawn = Spawn(number, times=3)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", spawn)
    child = Child("worker", SHORT)
    async with kept(child) as keeper:
        await until(lambda: child.starts >= 2, within_s=30)
        assert not keeper.done()
    messages = [record.getMessage() for record in caplog.records]
    told = [message for message in messages if "cannot be started" in message]
    assert len(told) == 3
    assert all(os.strerror(number) in message and "next try in" in message for message in told)


async def test_a_group_that_cannot_be_looked_at_does_not_end_its_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong implementation raised when no file could be opened, and nobody kept the child any more."""

    def nothing_left(_: Path) -> list[Path]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    child = Child("worker", LONG)
    monkeypatch.setattr(supervisor, "_GROUP_S", 0.0)
    async with kept(child) as keeper:
        await until(lambda: child.starts == 1)
        monkeypatch.setattr(Path, "iterdir", nothing_left)
        assert list(supervisor._members(os.getpgrp())) == []
        assert child.process is not None
        child.process.kill()
        await until(lambda: child.starts == 2)
        assert not keeper.done()


async def test_a_keeper_that_cannot_go_on_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "create_subprocess_exec", Spawn(errno.ENOMEM, times=1_000))
    with pytest.raises(ServiceError, match="the worker cannot be started again, after 10 tries: Cannot allocate"):
        await asyncio.wait_for(Child("worker", SHORT).keep(), 30)


async def test_a_first_start_that_fails_is_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="the worker cannot be started: No such file"):
        await asyncio.wait_for(Child("worker", [str(tmp_path / "nothing")]).keep(), 30)


@pytest.mark.parametrize("again", [True, False])
async def test_a_child_is_started_again_only_if_that_is_wanted_and_the_log_says_what_happens(
    again: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The wrong implementation said that it starts a child again, and its owner ended everything."""
    child = Child("worker", SHORT, on_exit=lambda _: again)
    async with kept(child) as keeper:
        await until(lambda: child.starts >= 2 if again else keeper.done(), within_s=30)
    assert (child.starts >= 2) is again
    assert ("starting it again" in caplog.text) is again


async def supervised(home: Path) -> int:
    async with asyncio.timeout(30):
        return await serve._supervise(ServeOptions(AT_ONCE, (), ()), home)


def test_a_worker_that_ends_before_it_is_ready_is_not_started_again_and_serve_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    children = Child("worker", SHORT), Child("frontend", LONG)
    monkeypatch.setattr(serve, "_children", lambda *_: children)
    monkeypatch.setattr(serve, "_ask_ready", lambda _: (False, "waiting"))
    with pytest.raises(ConfigError, match="the worker could not start: it ended with code 3, and is not started again"):
        asyncio.run(supervised(tmp_path))
    assert children[0].starts == 1
    assert "starting it again" not in caplog.text


@pytest.mark.parametrize("delay_s", [0.0, 7.5])
def test_the_frontend_of_serve_has_its_drain_delay_and_the_worker_none(delay_s: float, tmp_path: Path) -> None:
    """Nobody balances over the children of one command, and the worker ends when the frontend has."""
    options = ServeOptions(ServeSettings("m", drain_delay_s=delay_s), ["--drain-s=3"], [])
    worker, frontend = serve._children(options, tmp_path, 1)
    assert worker.command[-1] == "--drain-delay-s=0"
    assert frontend.command[-1] == f"--drain-delay-s={delay_s}"


@pytest.mark.parametrize("ready", [True, False])
def test_serve_ends_with_the_reason_when_nobody_keeps_a_child_running(
    ready: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrong implementation waited for a signal only, for ever and without a worker."""
    path = tmp_path / "child"
    children = Child("worker", program(path, 'rm "$0"; exit 3')), Child("frontend", LONG)
    monkeypatch.setattr(serve, "_children", lambda *_: children)
    monkeypatch.setattr(serve, "_ask_ready", lambda _: (ready, "waiting"))
    if not ready:
        children[0].starts = 1  # as after a start that went well
        path.unlink()
    with pytest.raises(ServiceError, match="the worker cannot be started again, after 10 tries: No such file"):
        asyncio.run(supervised(tmp_path))
    frontend = children[1].process
    assert frontend is not None
    assert frontend.returncode is not None, "what it started has ended with it"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (3, "ended with code 3"),
        (-9, "was killed (SIGKILL; out of memory?)"),
        (-11, "was killed (SIGSEGV)"),
        (-99, "was killed (signal 99)"),
    ],
)
def test_an_exit_code_is_said_in_words(code: int, words: str) -> None:
    assert ending(code) == words
