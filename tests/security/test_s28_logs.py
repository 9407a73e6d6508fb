"""S28: `semel frontend` answers while nobody reads its log; with a handler that writes by itself it never starts.

For a minute, with chats, under a supervisor: `tests/serve/test_unread_logs.py`.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from semel.lab.bench.ports import free_port
from semel.settings.secrets import create_key
from tests.serve.served import SEMEL, sum_of

KEY = "a-key-of-a-tenant"
F_SETPIPE_SZ = 1031
WITHIN_S = 60.0


def full_pipe() -> tuple[int, int]:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, F_SETPIPE_SZ, 4_096)
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(256))
    os.set_blocking(writer, True)
    return reader, writer


def full_disk() -> tuple[int, int]:
    return os.open("/dev/full", os.O_RDONLY), os.open("/dev/full", os.O_WRONLY)


@pytest.mark.slow
@pytest.mark.parametrize("log", [full_pipe, full_disk])
def test_a_frontend_whose_log_nobody_reads_answers_probes_tenants_and_strangers(
    log: Callable[[], tuple[int, int]], tmp_path: Path
) -> None:
    create_key(tmp_path / "key")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    port, metrics_port = free_port(), free_port()
    command = [SEMEL, "frontend", tmp_path / "model", "--fleet-key-file", tmp_path / "key", "--skip-checks"]
    command += [f"--worker=ipc://{tmp_path}/w.sock", f"--port={port}", f"--metrics-port={metrics_port}"]
    command += [f"--api-key={KEY}", "--preprocessing-processes=1"]
    reader, writer = log()
    process = subprocess.Popen(list(map(str, command)), stdout=writer, stderr=writer, process_group=0)
    os.close(writer)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=5.0) as client:
            deadline = time.monotonic() + WITHIN_S
            while True:
                with suppress(httpx.TransportError):
                    if client.get("/health").status_code == 200:
                        break
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
            for _ in range(200):  # 20 KB of access log, five times what the pipe holds
                assert client.get("/v1/files/x", headers={"authorization": f"Bearer {KEY}"}).status_code in (404, 503)
                assert client.get("/v1/models", headers={"authorization": "Bearer no"}).status_code == 401
            assert client.get("/health").status_code == 200
        dropped = sum_of(httpx.get(f"http://127.0.0.1:{metrics_port}/metrics").text, "semel_log_lines_dropped_total")
        assert (dropped >= 100) is (log is full_disk)  # a queue of 4 MiB holds what a pipe does not take
    finally:
        process.kill()
        process.wait(30)
        os.close(reader)
