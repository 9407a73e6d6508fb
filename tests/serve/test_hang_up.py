"""SIGHUP does not end a service unasked. In real processes, without a model."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import signal
import subprocess
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from semel.lab.bench.ports import free_port
from semel.settings.secrets import create_key
from tests.conftest import Folder
from tests.serve.served import SEMEL, Served, until
from tests.serve.test_draining import (
    DRAIN_S,
    RATE,
    TOKENS,
    client_of,
    started,
    streamed,
    until_ready,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


@pytest.fixture(autouse=True)
def hang_ups_are_heard() -> Iterator[None]:
    """Processes inherit what becomes of SIGHUP: under `nohup` it is ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@contextmanager
def in_terminal(home: Path, *command: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A command of semel in a terminal of its own, and our end of that."""
    ours, theirs = pty.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        [str(SEMEL), *command],
        **dict.fromkeys(("stdin", "stdout", "stderr"), theirs),  # type: ignore[call-overload]
        env=os.environ | {"TMPDIR": str(home)},
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    os.close(theirs)
    try:
        yield process, ours
    finally:
        if process.poll() is None:
            for one in (*psutil.Process(process.pid).children(recursive=True), process):
                one.kill()
        process.wait(10)


def discard_output(terminal: int) -> None:
    """Take what is printed, so that nobody has to wait for it."""
    with suppress(OSError):
        while os.read(terminal, 1 << 16):
            pass


async def during_stream(served: Served, act: Callable[[], None]) -> list[int]:
    """The numbers of a stream during which something happens."""
    begun = asyncio.Semaphore(0)
    async with client_of(served) as client:
        stream = asyncio.create_task(streamed(client, begun))
        await begun.acquire()
        act()
        return await stream


def test_serve_drains_when_its_terminal_goes_and_leaves_no_key(tiny: Folder, tmp_path: Path) -> None:
    port = free_port()
    flags = ("--port", str(port), "--rate", str(RATE), "--drain-s", DRAIN_S, "--preprocessing-processes", "1")
    with in_terminal(tmp_path, "testing", "serve", str(tiny("qwen2-vl")), *flags) as (process, terminal):
        copy = os.dup(terminal)
        reading = threading.Thread(target=discard_output, args=(copy,), daemon=True)
        reading.start()
        served = Served(process, f"http://127.0.0.1:{port}", tmp_path, tmp_path / "none.log", 0.0)
        until(lambda: served.ready()[0] or process.poll() is not None, 240)
        family, folder = served.processes(), served.folder
        assert (folder / "key").exists()

        def hang_up() -> None:
            os.close(terminal)
            os.close(copy)

        assert asyncio.run(asyncio.wait_for(during_stream(served, hang_up), 240)) == list(range(TOKENS))
        assert process.wait(60) == 0
        assert not [one for one in family if one.is_running() and one.status() != "zombie"]
        assert not folder.exists()


def test_a_frontend_and_a_worker_drain_on_a_hang_up(tiny: Folder, tmp_path: Path) -> None:
    model, port, address = str(tiny("qwen2-vl")), free_port(), f"ipc://{tmp_path}/w.sock"
    metrics_port = free_port()
    create_key(tmp_path / "key")
    key = ("--fleet-key-file", str(tmp_path / "key"), "--drain-delay-s", "0", "--drain-s", DRAIN_S)
    with (
        started(tmp_path, "testing", "worker", model, "--listen", address, "--rate", str(RATE), *key) as worker,
        started(
            tmp_path,
            *("frontend", model, "--port", str(port), "--preprocessing-processes", "1", "--worker", address, *key),
            *("--metrics-port", str(metrics_port)),
        ) as frontend,
        httpx.Client(base_url=f"http://127.0.0.1:{metrics_port}", timeout=30) as operator,
    ):
        served = Served(frontend, f"http://127.0.0.1:{port}", tmp_path, tmp_path / "frontend.log", 0.0)
        until_ready(served)
        assert [operator.get(path).status_code for path in ("/health", "/ready", "/metrics")] == [200] * 3
        assert operator.get("/v1/models").status_code == 404

        def hang_up() -> None:
            for process in (worker, frontend):
                process.send_signal(signal.SIGHUP)
            until(lambda: operator.get("/ready").status_code == 503, 6)  # the stream has eight seconds

        assert asyncio.run(asyncio.wait_for(during_stream(served, hang_up), 240)) == list(range(TOKENS))
        assert (worker.wait(60), frontend.wait(60)) == (0, 0)
