"""The reference: one server of bare vLLM, with the flags and the item cache of a worker."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from semel.lab.bench.ports import free_port
from semel.lab.prove.processes import ENGINE_FLAGS, ENGINE_START_S, ENVIRONMENT, ITEM_CACHE_GB, VLLM, Node

__all__ = ["running_bare"]


@contextmanager
def running_bare(model: Path, flags: Sequence[str] = ENGINE_FLAGS) -> Iterator[Node]:
    """vLLM's own server, up, with stored Responses; ended at the end."""
    with tempfile.TemporaryDirectory(prefix="semel-bare-") as home:
        port, log = free_port(), Path(home) / "bare.log"
        command = [*VLLM, "--model", str(model), "--host", "127.0.0.1", "--port", str(port), *flags]
        command += ["--mm-processor-cache-gb", f"{ITEM_CACHE_GB:.9f}"]
        env = os.environ | ENVIRONMENT | {"TMPDIR": home, "VLLM_RPC_BASE_PATH": home, "SEMEL": "0"}
        env["VLLM_ENABLE_RESPONSES_API_STORE"] = "1"
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=env, process_group=0)  # noqa: S603
        server = Node("bare vLLM", process, f"http://127.0.0.1:{port}", log)
        try:
            server.until_up("/health", ENGINE_START_S)
            yield server
        finally:
            server.end()
