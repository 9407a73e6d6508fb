"""Processes with every flag off its default: their command lines, and what can be asked of them from outside.

Two pairs of a worker and a frontend, so that no two flags are in each other's way: `served` has an engine without a
model behind the whole of `semel worker`, `edge` the worker of `semel testing`. A third frontend only has to fail.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil

from semel.lab.bench.ports import free_port
from tests.serve.served import SEMEL, sum_of, until
from tests.wiring.command import RECORD

__all__ = ["ROOT", "Flags", "Origin", "Places", "Running", "flags_as_words", "origin", "running"]

ROOT = Path(__file__).parents[2]
WITHIN_S = 120.0
END_S = 30.0
Flags = Mapping[str, object]


@dataclass(frozen=True)
class Places:
    """Files and ports of the processes of one test."""

    home: Path
    model: Path
    port: int = field(default_factory=free_port)
    metrics_port: int = field(default_factory=free_port)
    worker_port: int = field(default_factory=free_port)
    admin_port: int = field(default_factory=free_port)
    origin_port: int = 1
    store_port: int = 1

    @property
    def worker(self) -> str:
        return f"ipc://{self.home}/w.sock"


def flags_as_words(flags: Flags) -> list[str]:
    """Flags as the words of a command line."""
    words: list[str] = []
    for name, value in flags.items():
        match value:
            case True:
                words.append(f"--{name}")
            case tuple():
                words += [f"--{name}={one}" for one in value]
            case _:
                words.append(f"--{name}={value}")
    return words


@dataclass(frozen=True)
class Running:
    """A process of the test."""

    process: subprocess.Popen[bytes]
    log: Path
    url: str
    metrics_url: str
    record: Path
    tls: ssl.SSLContext | None = None

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def recorded(self) -> Any:
        return json.loads(self.record.read_text())

    def client(self, key: str = "", **options: Any) -> httpx.Client:
        """A client whose connections are its own, and end with each request."""
        headers = {"connection": "close"} | ({"authorization": f"Bearer {key}"} if key else {})
        verify = self.tls or False
        return httpx.Client(base_url=self.url, headers=headers, verify=verify, timeout=WITHIN_S, **options)

    def post(self, path: str, body: object, key: str = "") -> httpx.Response:
        with self.client(key) as client:
            return client.post(path, json=body)

    def page(self) -> str:
        return httpx.get(f"{self.metrics_url}/metrics", timeout=WITHIN_S).text

    def metric(self, name: str, labels: str = "") -> float:
        return sum_of(self.page(), name, labels)

    def connect(self) -> socket.socket:
        """A plain connection to the port of its API."""
        url = httpx.URL(self.url)
        connection = socket.create_connection((url.host, url.port or 0), WITHIN_S)
        if self.tls is None:
            return connection
        return self.tls.wrap_socket(connection, server_hostname="localhost")

    def until_ready(self, path: str = "/ready") -> None:
        """Wait until it answers 200 there."""
        last = ""

        def is_ready() -> bool:
            nonlocal last
            assert self.process.poll() is None, self.text[-4_000:]
            try:
                reply = httpx.get(self.metrics_url + path, timeout=10)
            except httpx.TransportError as error:
                last = repr(error)
                return False
            last = reply.text
            return reply.status_code == 200

        try:
            until(is_ready, WITHIN_S)
        except AssertionError as error:
            raise AssertionError(f"{self.metrics_url}: {last}; {self.text[-3_000:]}") from error

    def end(self) -> None:
        """Ask it to end, and wait; whoever does not is killed, which is a failure."""
        if self.process.poll() is not None:
            return
        family = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        self.process.terminate()
        _, alive = psutil.wait_procs(family, END_S)
        for one in alive:
            one.kill()
        self.process.wait(END_S)
        assert not alive, self.text[-4_000:]


@contextmanager
def running(
    name: str,
    home: Path,
    *words: object,
    url: str = "",
    metrics_url: str = "",
    tls: ssl.SSLContext | None = None,
    environment: Mapping[str, str] | None = None,
    preexec: Callable[[], None] | None = None,
) -> Iterator[Running]:
    """A process that is ended at the end; `semel`, or with the word `wired` first the command of `tests.wiring`."""
    command = [sys.executable, "-m", "tests.wiring.command", *words[1:]] if words[0] == "wired" else [SEMEL, *words]
    log, record = home / f"{name}.log", home / f"{name}.json"
    env = os.environ | {"TMPDIR": str(home), RECORD: str(record)} | dict(environment or {})
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(map(str, command)), stdout=output, stderr=output, env=env, cwd=ROOT, preexec_fn=preexec
        )
    made = Running(process, log, url, metrics_url, record, tls)
    try:
        yield made
    finally:
        made.end()


@dataclass
class Origin:
    """An HTTP server: it has files, takes whatever is posted, and never answers `/slow`."""

    port: int
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)


@contextmanager
def origin() -> Iterator[Origin]:
    made = Origin(0)
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            made.asked.append(self.path)
            if self.path == "/slow":
                ended.wait(WITHIN_S)
            self._answer(made.files.get(self.path, b""))

        def do_POST(self) -> None:
            made.asked.append(self.path)
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self._answer(b"")

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("content-type", "image/png")
            self.send_header("content-length", str(len(body)))
            self.send_header("cache-control", "max-age=3600")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        made.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield made
        finally:
            ended.set()
            server.shutdown()
            thread.join(END_S)
