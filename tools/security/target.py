"""Servers of a tiny model, in processes of their own, to be attacked: semel, or bare vLLM under the same flags."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

import httpx
import psutil

from semel.lab.bench.ports import free_port
from tests.serve.served import until
from tools.security.attacker import BUDGET_BYTES, KEYS

__all__ = ["Against", "Target", "running"]

Against = Literal["semel", "vllm"]

FLAGS: Final = ("--enforce-eager", "--dtype", "float32", "--seed", "0", "--max-model-len", "4096")
ENVIRONMENT: Final = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
SEMEL_FLAGS: Final = (
    *("--max-media-bytes-in-flight", str(BUDGET_BYTES), "--max-request-media-bytes", str(BUDGET_BYTES // 2)),
    *(
        "--preprocessing-processes",
        "1",
        "--allow-media-http",
        "--allowed-media-networks",
        "127.0.0.0/8",
        "--engine-progress-s",
        "20",
        "--structured-outputs-kinds",
        "all",
    ),
)
START_S: Final = 400.0


@dataclass(frozen=True)
class Target:
    """A running server."""

    kind: Against
    process: subprocess.Popen[bytes]
    url: str
    upstream: str
    metrics_url: str = ""
    worker_url: str = ""
    """The metrics of its worker."""

    @property
    def probe(self) -> str:
        return "/ready" if self.kind == "semel" else "/health"

    def http_process(self) -> psutil.Process:
        """Return the process that speaks HTTP."""
        process = psutil.Process(self.process.pid)
        if self.kind == "vllm":
            return process
        return next(child for child in process.children() if "frontend" in child.cmdline())

    def engine_core(self) -> psutil.Process:
        family = psutil.Process(self.process.pid).children(recursive=True)
        return next(child for child in family if child.name().startswith("VLLM::Engine"))

    def roles(self) -> Iterator[tuple[str, psutil.Process]]:
        """Yield all of its processes, by what they do."""
        server = psutil.Process(self.process.pid)
        if self.kind == "vllm":
            yield "server", server
        for child in server.children():
            role = next((role for role in ("frontend", "worker") if role in child.cmdline()), "engine")
            yield role, child
            for process in child.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    yield _role_of(process, role), process


def _role_of(process: psutil.Process, parent: str) -> str:
    if process.name().startswith("VLLM::") or parent == "engine":
        return "engine"
    if parent == "frontend":
        return "pool"
    return "grammars" if any("grammars.child" in word for word in process.cmdline()) else parent


@contextlib.contextmanager
def running(
    kind: Against,
    model: Path,
    home: Path,
    upstream_url: str,
    *,
    keys: Mapping[str, str] = KEYS,
    flags: Sequence[str] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
    max_files: int = 0,
) -> Iterator[Target]:
    """The server under attack, ready; ended with everything that belongs to it.

    `max_files` is how many files each of its processes may open, as `ulimit -n` sets it.
    """
    port, metrics_port, admin_port = free_port(), free_port(), free_port()
    if kind == "semel":
        file = home / "keys"
        file.write_text("".join(f"{name} {key}\n" for name, key in keys.items()))
        file.chmod(0o600)
        command = [
            sys.executable,
            "-m",
            "semel",
            "serve",
            str(model),
            *FLAGS,
            *SEMEL_FLAGS,
            "--api-keys-file",
            str(file),
        ]
        command += ["--allowed-media-domains", upstream_url.partition("//")[2], "--metrics-port", str(metrics_port)]
        command += ["--admin-port", str(admin_port)]
    else:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *FLAGS]
        command += ["--served-model-name", str(model), "--allowed-media-domains", "127.0.0.1"]
    log = home / f"{kind}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *flags, "--host", "127.0.0.1", "--port", str(port)],
            stdout=output,
            stderr=output,
            env=os.environ | ENVIRONMENT | {"TMPDIR": str(home), **variables},
            process_group=0,
            preexec_fn=partial(resource.setrlimit, resource.RLIMIT_NOFILE, (max_files,) * 2) if max_files else None,
        )
    urls = (f"http://127.0.0.1:{number}" for number in (metrics_port, admin_port))
    target = Target(kind, process, f"http://127.0.0.1:{port}", upstream_url, *urls)

    def is_up() -> bool:
        assert process.poll() is None, log.read_text(errors="replace")[-3_000:]
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(target.url + target.probe, timeout=5).status_code == 200
        return False

    family: list[psutil.Process] = []
    try:
        until(is_up, START_S)
        yield target
    finally:
        with contextlib.suppress(psutil.Error):
            family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        for child in family:
            with contextlib.suppress(psutil.Error):
                child.kill()
        process.kill()
        process.wait(10)
