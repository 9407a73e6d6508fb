"""What tests of the door share: one start of vLLM's own server with semel inside it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.fleet.door import cache_gb
from tools.fleet.processes import running_fleet

IMAGES = 120
"""The server's item cache has room for a tenth of so many small images."""


@dataclass(frozen=True)
class DoorServer:
    """A server of plain vLLM with `SEMEL=1`, which is a worker too."""

    base_url: str
    process: subprocess.Popen[bytes]
    model: Path
    log: Path
    home: Path
    """A folder with the fleet's `key`."""

    listen: str


@pytest.fixture(scope="session")
def door_server(tiny: Callable[[str], Path]) -> Iterator[DoorServer]:
    """`SEMEL=1 SEMEL_LISTEN=… vllm serve`, up."""
    with running_fleet(tiny("qwen2-vl"), workers=0, frontends=0) as fleet:
        door = fleet.begin_door(cache_gb=cache_gb(IMAGES))
        fleet.until_up()
        yield DoorServer(door.url, door.process, fleet.model, door.log, fleet.home, door.address)
