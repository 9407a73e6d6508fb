"""The control: one server of bare vLLM, with the flags and the item cache of a worker."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from semel.lab.bench.ports import free_port
from tools.fleet.processes import ENGINE_FLAGS, ENGINE_START_S, ENVIRONMENT, ITEM_CACHE_GB, VLLM, Node


@contextmanager
def running_bare(model: Path) -> Iterator[Node]:
    """vLLM's own server, up; ended at the end."""
    with tempfile.TemporaryDirectory(prefix="semel-bare-") as home:
        port, log = free_port(), Path(home) / "vllm.log"
        command = [*VLLM, "--model", str(model), "--host", "127.0.0.1", "--port", str(port), *ENGINE_FLAGS]
        command += ["--mm-processor-cache-gb", f"{ITEM_CACHE_GB:.9f}"]
        env = os.environ | ENVIRONMENT | {"TMPDIR": home, "VLLM_RPC_BASE_PATH": home}
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=env, process_group=0)
        server = Node("bare vLLM", process, f"http://127.0.0.1:{port}", log)
        try:
            server.until_up("/health", ENGINE_START_S)
            yield server
        finally:
            server.end()
