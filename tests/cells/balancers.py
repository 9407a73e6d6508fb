"""Real balancers before cells: Envoy from PyPI, and HAProxy, which scripts/install unpacks from Debian's package."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.serve.served import until

ENVOY = str(Path(sys.executable).parent / "envoy")
START_S = 60.0
END_S = 20.0


def haproxy() -> str:
    """The program's path. Without one a test is skipped, but for CI, where it fails."""
    folder = Path(sys.prefix) / "opt" / "haproxy"
    path = shutil.which("haproxy", path=f"{folder}{os.pathsep}{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin")
    if path is None and os.environ.get("CI"):
        pytest.fail("there is no haproxy: scripts/install unpacks it from Debian's packages")
    return path or pytest.skip("there is no haproxy: `apt install haproxy`, or scripts/install on Debian")


def check_envoy(path: Path) -> subprocess.CompletedProcess[str]:
    return _checked([ENVOY, "--mode", "validate", "--config-path", str(path)])


def check_haproxy(path: Path) -> subprocess.CompletedProcess[str]:
    return _checked([haproxy(), "-c", "-f", str(path)])


def _checked(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)


@dataclass(frozen=True)
class Balancer:
    """One that is running."""

    url: str
    log: Path

    def get(self, path: str, key: str) -> httpx.Response:
        """Over a connection of its own, as a new client has it."""
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.get(f"{self.url}{path}", headers=headers, timeout=30, verify=False)


@contextmanager
def running_envoy(config: str, port: int, home: Path, name: str = "envoy") -> Iterator[Balancer]:
    (path := home / f"{name}.json").write_text(config)
    url, log = f"http://127.0.0.1:{port}", home / f"{name}.log"
    with running(envoy_command(path), url, log):
        yield Balancer(url, log)


@contextmanager
def running_haproxy(config: str, port: int, home: Path) -> Iterator[Balancer]:
    (path := home / "haproxy.cfg").write_text(config)
    url, log = f"http://127.0.0.1:{port}", home / "haproxy.log"
    with running([haproxy(), "-f", str(path)], url, log):
        yield Balancer(url, log)


def envoy_command(path: Path) -> Sequence[str]:
    return [ENVOY, "--config-path", str(path), "--concurrency", "1", "--use-dynamic-base-id", "--log-level", "warn"]


@contextmanager
def running(command: Sequence[str], url: str, log: Path, verify: ssl.SSLContext | bool = False) -> Iterator[None]:
    """A balancer that answers, until it is left."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)

    def answers() -> bool:
        assert process.poll() is None, log.read_text()[-3_000:]
        try:
            return httpx.get(f"{url}/ready", timeout=10, verify=verify).status_code == 200
        except httpx.TransportError:
            return False

    try:
        until(answers, START_S, every_s=0.1)
        yield
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(END_S)
