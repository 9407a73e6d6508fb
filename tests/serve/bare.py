"""vLLM's own server, started beside `semel serve` over the same model with the same flags."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from semel.lab.bench.ports import free_port
from tests.serve.served import FLAGS, until

__all__ = ["bare_starting", "until_healthy"]


@contextmanager
def bare_starting(
    folder: Path, home: Path, *flags: str, variables: Mapping[str, str] | None = None
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Its URL, at once: it is up when `/health` answers. Ended at the end."""
    port, log = free_port(), home / "vllm.log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), *FLAGS, *flags]
    env = os.environ | {"TMPDIR": str(home), "VLLM_RPC_BASE_PATH": str(home), **(variables or {})}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=env, process_group=0)
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        its_own = _family(process) if process.poll() is None else []
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        for one in its_own:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait(5)


def _family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    parent = psutil.Process(process.pid)
    return [parent, *parent.children(recursive=True)]


def until_healthy(url: str, process: subprocess.Popen[bytes], within_s: float) -> None:
    """Wait until it answers."""

    def healthy() -> bool:
        assert process.poll() is None, "vLLM's server has ended"
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{url}/health", timeout=2).status_code == 200
        return False

    until(healthy, within_s)
