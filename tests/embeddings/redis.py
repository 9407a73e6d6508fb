"""A real Redis, for tests: `redis-server`, which scripts/install unpacks from Debian's package."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from semel.embeddings.address import StoreAddress
from semel.embeddings.resp import RespStore
from semel.lab.bench.ports import free_port
from tests.embeddings.certificates import Authority
from tests.serve.served import until
from tests.waiting import end

INSTALLED = Path(sys.prefix) / "opt" / "redis"
START_S = 60.0
PATIENT_S = 30.0
Reply = bytes | int | None


def find() -> str:
    """The program's path. Without one a test is skipped, but for CI, where it fails."""
    path = shutil.which("redis-server", path=f"{INSTALLED}{os.pathsep}{os.environ.get('PATH', '')}")
    if path is None and os.environ.get("CI"):
        pytest.fail("there is no redis-server: scripts/install unpacks it from Debian's packages")
    return path or pytest.skip("there is no redis-server: `apt install redis-server`, or scripts/install on Debian")


@dataclass(frozen=True)
class Redis:
    """A server that is running. Everybody is `default`, with this password if there is one."""

    address: StoreAddress
    socket_path: str
    """Where it can be reached without TLS, whatever the address is."""
    process: subprocess.Popen[bytes]
    password: str | None = None
    authority: Authority | None = None

    @property
    def url(self) -> str:
        if self.address.path is not None:
            return f"unix://{self.address.path}"
        return f"{'valkeys' if self.address.is_encrypted else 'valkey'}://{self.address.name}"

    def store(self) -> RespStore:
        tls = None if self.authority is None else self.authority.client_context()
        return RespStore(self.address, tls=tls, password=self.password)

    def ask(self, *command: bytes | str | int) -> Reply:
        """One command, over a connection of its own, as anybody could who has the password."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PATIENT_S)
            connection.connect(self.socket_path)
            with connection.makefile("rwb") as file:
                if self.password is not None:
                    file.write(_command("AUTH", self.password))
                    file.flush()
                    assert file.readline() == b"+OK\r\n"
                file.write(_command(*command))
                file.flush()
                line = file.readline().rstrip(b"\r\n")
                if line.startswith(b"$"):
                    length = int(line[1:])
                    return None if length < 0 else file.read(length + 2)[:-2]
                if line.startswith(b"*"):
                    return b"\n".join(file.read(int(file.readline()[1:]) + 2)[:-2] for _ in range(int(line[1:])))
                assert not line.startswith(b"-"), line
                return int(line[1:]) if line.startswith(b":") else line[1:]

    def all_keys(self) -> list[bytes]:
        found = self.ask("KEYS", "*")
        assert isinstance(found, bytes)
        return found.split(b"\n") if found else []

    def is_up(self) -> bool:
        assert self.process.poll() is None, "redis-server has ended"
        try:
            return self.ask("PING") == b"PONG"
        except (OSError, AssertionError):
            return False


@contextmanager
def running_redis(
    home: Path,
    *,
    is_unix: bool = False,
    password: str | None = None,
    authority: Authority | None = None,
    port: int | None = None,
    options: Sequence[str] = (),
) -> Iterator[Redis]:
    """A Redis of its own, on a port of 127.0.0.1 or a socket, which keeps nothing on the disk."""
    port = port or free_port()
    path = str(home / "redis.sock")
    command = [find(), "--save", "", "--appendonly", "no", "--dir", str(home), "--unixsocket", path]
    if is_unix:
        address = StoreAddress(path=path)
        command += ["--port", "0"]
    elif authority is None:
        address = StoreAddress(host="127.0.0.1", port=port)
        command += ["--bind", "127.0.0.1", "--port", str(port)]
    else:
        address = StoreAddress(host="localhost", port=port, is_encrypted=True)
        command += ["--bind", "127.0.0.1", "--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no"]
        command += ["--tls-cert-file", str(authority.certificate), "--tls-key-file", str(authority.private_key)]
        command += ["--tls-ca-cert-file", str(authority.root)]
    if password is not None:
        command += ["--requirepass", password]
    with (home / "redis.log").open("ab") as log:
        process = subprocess.Popen([*command, *options], stdout=log, stderr=log, cwd=home)
    redis = Redis(address, path, process, password, authority)
    try:
        until(redis.is_up, START_S)
        yield redis
    finally:
        end(process)


def soon(seconds: float = PATIENT_S) -> float:
    """A deadline that nothing reaches which works."""
    return time.monotonic() + seconds


def _command(*parts: bytes | str | int) -> bytes:
    raw = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    return b"*%d\r\n" % len(raw) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in raw)
