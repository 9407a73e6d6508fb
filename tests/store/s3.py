"""A server that speaks S3: moto's, in a process of its own, on this machine. No claim about a cloud."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from semel.lab.bench.ports import free_port

__all__ = ["BUCKET", "S3_VARIABLES", "s3_process", "s3_server"]

BUCKET: Final = "media"
S3_VARIABLES: Final = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
_START_S: Final = 120.0


@contextmanager
def s3_process(folder: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The server's address and its process. It has a bucket."""
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with (folder / "moto.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            _make_bucket(endpoint, process)
            yield endpoint, process
        finally:
            process.kill()
            process.wait(timeout=30)


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """The server's address."""
    with s3_process(folder) as (endpoint, _):
        yield endpoint


def _make_bucket(endpoint: str, process: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + _START_S
    while True:
        request = urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                assert response.status == 200
                return
        except OSError:
            assert process.poll() is None, "moto's server has ended"
            assert time.monotonic() < until_s, "moto's server does not start"
            time.sleep(0.1)
