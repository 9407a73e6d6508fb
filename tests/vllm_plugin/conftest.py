"""A plain vLLM server with semel inside, which all files `test_server*.py` here share: one start of an engine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from semel.lab.prove.processes import running_fleet
from tools.fleet.door import cache_gb

__all__ = ["DoorServer", "door_server"]

HOSTILE = Path(__file__).parent / "hostile_decoder"
IMAGES = 120
"""The server's item cache has room for a tenth of so many small images."""


@dataclass(frozen=True)
class DoorServer:
    """`SEMEL=1 vllm serve`, a worker too, with a bug planted into its decoder of images."""

    base_url: str
    process: subprocess.Popen[bytes]
    folder: Path
    """The model's."""
    log: Path
    home: Path
    """A folder with the fleet's `key`."""
    listen: str


@pytest.fixture(scope="session")
def door_server(tiny: Callable[[str], Path]) -> Iterator[DoorServer]:
    """The server, up."""
    path = os.pathsep.join(filter(None, (str(HOSTILE), os.environ.get("PYTHONPATH"))))
    with running_fleet(tiny("qwen2-vl"), workers=0, frontends=0) as fleet:
        door = fleet.begin_door(cache_gb=cache_gb(IMAGES), variables={"PYTHONPATH": path})
        fleet.until_up()
        yield DoorServer(door.url, door.process, fleet.model, door.log, fleet.home, door.address)
