"""A patch of a library splits a fleet only if it changes what comes out (issue 20.3): real processes, real sockets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from semel.lab.bench.ports import free_port
from semel.processing.fingerprint import minor_version, public_version
from semel.settings.secrets import create_key
from semel.telemetry.metrics import WORKER_CONNECTED, WORKER_REFUSED
from tests.processing.test_hf import Folder
from tests.serve.served import SEMEL, until

START_S = 300.0
END_S = 15.0
PILLOW = public_version("pillow") or ""
MAJOR, MINOR, PATCH = (int(number) for number in PILLOW.split("."))
HARMLESS = f"{MAJOR}.{MINOR}.{PATCH + 1}"
FLIPPING = f"{MAJOR}.{MINOR}.{PATCH + 2}+flip"
PROBE = "jpeg CMYK baseline quality 30 4:4:4"


@dataclass
class Fleet:
    """A frontend, and workers that join it one by one."""

    model: Path
    home: Path
    stack: ExitStack
    url: str = ""

    def address(self, pillow: str) -> str:
        return f"ipc://{self.home}/{pillow.replace('+', '-')}.sock"

    def worker(self, pillow: str) -> None:
        """Start a worker with this Pillow."""
        command = (sys.executable, "-m", "tests.fleet.patched_worker", pillow, self.model)
        self._start("worker", *command, "--listen", self.address(pillow))

    def frontend(self, *addresses: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        workers = [word for address in addresses for word in ("--worker", address)]
        self._start("frontend", SEMEL, "frontend", self.model, *workers, "--port", port, "--preprocessing-processes", 1)

    def metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", timeout=30).text

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=10).status_code == 200
        except httpx.TransportError:
            return False

    def log(self) -> str:
        return (self.home / "frontend.log").read_text()

    def _start(self, name: str, *command: object) -> None:
        words = [str(word) for word in (*command, "--fleet-key-file", self.home / "key")]
        with (self.home / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(words, stdout=log, stderr=log, env=os.environ | {"TMPDIR": str(self.home)})
        self.stack.callback(_end, process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def running(model: Path, home: Path) -> Iterator[Fleet]:
    create_key(home / "key")
    with ExitStack() as stack:
        yield Fleet(model, home, stack)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_patch_that_changes_nothing_splits_no_fleet_and_one_that_flips_a_bit_is_refused_with_the_probe(
    tiny: Folder, tmp_path: Path
) -> None:
    """Controls: exact versions tell the frontend from both workers, and minor versions alone from neither."""
    with running(tiny("qwen2-vl"), tmp_path) as fleet:
        harmless, flipping = fleet.address(HARMLESS), fleet.address(FLIPPING)
        fleet.worker(HARMLESS)
        fleet.frontend(harmless, flipping)
        until(fleet.is_ready, START_S)
        fleet.worker(FLIPPING)
        until(lambda: "is not used" in fleet.log(), START_S)
        metrics, log = fleet.metrics(), fleet.log()
        assert f'{WORKER_REFUSED.name}{{reason="probes",worker="{flipping}"}} 1.0' in metrics
        assert metrics.count(f"{WORKER_REFUSED.name}{{") == 1
        for address in (harmless, flipping):
            assert f'{WORKER_CONNECTED.name}{{worker="{address}"}} 1.0' in metrics
        (told,) = [line for line in log.splitlines() if "is not used" in line]
        assert f"{flipping} is not used: Pillow {HARMLESS} in the fleet, {FLIPPING.partition('+')[0]} there" in told
        assert f"decode {PROBE!r} differently" in told
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        assert httpx.post(f"{fleet.url}/v1/chat/completions", json=body, timeout=30).status_code == 200
    here, there = {minor_version(PILLOW)}, {minor_version(HARMLESS), minor_version(FLIPPING)}
    assert here == there
    assert PILLOW not in {HARMLESS, FLIPPING.partition("+")[0]}
