"""A plain vLLM server with semel inside, which all files `test_server*.py` here share: one start of an engine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.serve.bare import bare_starting, until_healthy

__all__ = ["DoorServer", "door_server"]

HOSTILE = Path(__file__).parent / "hostile_decoder"


@dataclass(frozen=True)
class DoorServer:
    """`SEMEL=1 vllm serve`, with a bug planted into its decoder of images."""

    base_url: str
    process: subprocess.Popen[bytes]
    folder: Path
    """The model's."""
    log: Path


@pytest.fixture(scope="session")
def door_server(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[DoorServer]:
    """The server, up."""
    home, folder = tmp_path_factory.mktemp("door"), tiny("qwen2-vl")
    path = os.pathsep.join(filter(None, (str(HOSTILE), os.environ.get("PYTHONPATH"))))
    with bare_starting(folder, home, variables={"SEMEL": "1", "PYTHONPATH": path}) as (url, process):
        until_healthy(url, process, 240)
        yield DoorServer(url, process, folder, home / "vllm.log")
