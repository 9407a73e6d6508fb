"""The clients, and an environment of its own for each: they disagree about versions of openai, Pillow and pyzmq."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_INSTALL_S: Final = 1_800.0


@dataclass(frozen=True)
class Client:
    """A client as users install it."""

    name: str
    version: str
    driver: str
    """The file in `scripts/client_drivers` that makes its requests, without `ask_`."""

    extra: tuple[str, ...] = ()
    """What is installed with it."""

    semel_only: tuple[str, ...] = ()
    """APIs that vLLM does not have. The client checks their answers itself."""


CLIENTS: Final = (
    Client("openai", "3.49.0", "openai", semel_only=("files", "documents", "stored responses")),
    Client("openai-agents", "0.24.0", "agents", semel_only=("stored responses",)),
    Client("anthropic", "2.8.0", "anthropic", semel_only=("documents",)),
    Client("langchain-openai", "1.7.3", "langchain"),
    Client("llama-index-llms-openai-like", "0.8.1", "llama_index"),
    Client("litellm", "1.104.0", "litellm"),
    Client("instructor", "1.17.0", "instructor"),
    Client("vllm bench serve", "", "vllm_bench"),
    Client("aiperf", "0.13.0", "aiperf"),
    Client("guidellm", "0.8.1", "guidellm", extra=("pillow", "torch==2.13.0")),
)
"""Those of `vllm bench serve` are in semel's own environment, with the engine."""


def python_of(client: Client, folder: Path) -> Path:
    """A Python that has this client; its environment is made if it is new."""
    if not client.version:
        return Path(sys.executable)
    venv = folder / f"{client.name}-{client.version}"
    python, complete = venv / "bin" / "python", venv / "complete"
    if not complete.exists():
        base = Path(sys.base_prefix) / "bin" / "python3"
        subprocess.run([str(base), "-m", "venv", "--clear", str(venv)], check=True, timeout=_INSTALL_S)
        command = [str(python), "-m", "pip", "install", "--quiet", f"{client.name}=={client.version}", *client.extra]
        subprocess.run(command, check=True, timeout=_INSTALL_S, stdin=subprocess.DEVNULL)
        complete.touch()
    return python
