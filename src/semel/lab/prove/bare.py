"""Bare vLLM, with the flags and the item cache of a worker: the reference, and what a fleet is compared with."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from semel.lab.bench.ports import free_port
from semel.lab.bench.serving.socket_bytes import FOLDER_VARIABLE
from semel.lab.prove.processes import ENGINE_FLAGS, ENGINE_START_S, ENVIRONMENT, ITEM_CACHE_GB, VLLM, Node

__all__ = ["begin_bare", "running_bare"]

_SEVERAL: Final = (sys.executable, "-m", "semel.lab.bench.serving.socket_bytes", "vllm", "serve")
"""The only form of vLLM's server that takes `--api-server-count`. It also counts bytes."""


def begin_bare(model: Path, home: Path, flags: Sequence[str], *, api_servers: int = 1, number: int = 0) -> Node:
    """Start vLLM's own server, with stored Responses. Its files are in `home`."""
    port, log = free_port(), home / f"bare-{number}.log"
    command = [*_SEVERAL, str(model), "--api-server-count", str(api_servers)]
    command = command if api_servers > 1 else [*VLLM, "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), *flags, "--mm-processor-cache-gb", f"{ITEM_CACHE_GB:.9f}"]
    env = os.environ | ENVIRONMENT | {"TMPDIR": str(home), "VLLM_RPC_BASE_PATH": str(home), "SEMEL": "0"}
    env |= {"VLLM_ENABLE_RESPONSES_API_STORE": "1", FOLDER_VARIABLE: str(home / f"counts-{number}")}
    Path(env[FOLDER_VARIABLE]).mkdir()
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=env, process_group=0)  # noqa: S603
    return Node(f"bare vLLM {number}", process, f"http://127.0.0.1:{port}", log)


@contextmanager
def running_bare(model: Path, flags: Sequence[str] = ENGINE_FLAGS) -> Iterator[Node]:
    """One of them, up; ended at the end."""
    with tempfile.TemporaryDirectory(prefix="semel-bare-") as home:
        server = begin_bare(model, Path(home), flags)
        try:
            server.until_up("/health", ENGINE_START_S)
            yield server
        finally:
            server.end()
