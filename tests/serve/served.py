"""A running `semel serve`, its processes, and what can be asked of it from outside."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from semel.lab.bench.ports import free_port

SEMEL = Path(sys.executable).parent / "semel"
FLAGS = ("--enforce-eager", "--dtype", "float32", "--max-model-len", "4096", "--seed", "0")


@dataclass(frozen=True)
class Served:
    """One `semel serve`, with its log and the folder of its socket and key."""

    process: subprocess.Popen[bytes]
    url: str
    home: Path
    log: Path
    ready_after_s: float

    @property
    def folder(self) -> Path:
        (folder,) = self.home.glob("semel-*")
        return folder

    def child(self, command: str) -> psutil.Process:
        """The process that runs `semel COMMAND` now."""
        for process in psutil.Process(self.process.pid).children():
            if command in process.cmdline():
                return process
        raise AssertionError(f"no {command} is running")

    def processes(self) -> list[psutil.Process]:
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def ready(self) -> tuple[bool, str | None]:
        try:
            body = httpx.get(f"{self.url}/ready", timeout=5).json()
        except httpx.HTTPError as error:
            return False, repr(error)
        return body["ready"], body["reason"]

    def running(self) -> float:
        """Requests that the worker answers, as it tells its frontends."""
        return self.metric("semel_worker_running_requests")

    def metric(self, name: str, labels: str = "") -> float:
        """The sum of a metric over all labels, or those that contain some text."""
        text = httpx.get(f"{self.url}/metrics", timeout=5).text
        return sum_of(text, name, labels)

    def chat(self, content: object, *, within_s: float = 60.0, **fields: object) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0.0, "max_tokens": 8, **fields}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=within_s)


@contextmanager
def serving(folder: Path, home: Path, *flags: str, within_s: float = 240) -> Iterator[Served]:
    """`semel serve`, ended with Ctrl-C at the latest when the test is done."""
    port = free_port()
    log = home / "serve.log"
    began = time.monotonic()
    with log.open("wb") as output:
        command = [str(SEMEL), "serve", str(folder), "--port", str(port), *FLAGS, *flags]
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=os.environ | {"TMPDIR": str(home)}, process_group=0
        )
    served = Served(process, f"http://127.0.0.1:{port}", home, log, 0.0)
    try:
        until(lambda: served.ready()[0] or process.poll() is not None, within_s)
        assert process.poll() is None, log.read_text()[-3_000:]
        yield Served(process, served.url, home, log, time.monotonic() - began)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            for child in served.processes():
                child.kill()
            raise


def sum_of(metrics: str, name: str, labels: str = "") -> float:
    """The sum of a metric in Prometheus' text, over all labels that contain some text."""
    found = re.findall(rf"^{name}(?:{{([^}}]*)}})? (\S+)$", metrics, re.MULTILINE)
    return sum(float(value) for its_labels, value in found if labels in its_labels)


def until(condition: Callable[[], bool], within_s: float, *, every_s: float = 0.02) -> float:
    """Wait for something that another process does; how long it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within_s, "it did not happen in time"
        time.sleep(every_s)
    return time.monotonic() - began


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream, without its closing mark."""
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def image_url(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}
