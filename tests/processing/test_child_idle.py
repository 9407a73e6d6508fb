"""A pool process keeps the buffers of items for the next one, and gives them back when there is none for a while."""

from __future__ import annotations

import subprocess
import sys

import pytest

from semel.processing.pool.command import child_environment
from tests.processing.test_pool import LOADING_S

PROGRAM = """
import re, socket, sys
from semel.processing.pool import child

def resident_mib():
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) >> 10

child._IDLE_S = 0.05
ours, theirs = socket.socketpair()
before = resident_mib()
buffers = [bytes(100_000) for _ in range(600)]
del buffers
if sys.argv[1] == "busy":
    theirs.send(b"an order")
child._give_back_memory_if_idle(ours)
print(resident_mib() - before)
"""


@pytest.mark.parametrize(("state", "most_mib", "least_mib"), [("idle", 20, -100), ("busy", 100, 40)])
def test_an_idle_process_gives_buffers_back_and_a_busy_one_keeps_them(
    state: str, most_mib: int, least_mib: int
) -> None:
    """The busy one is the control: nothing else gives them back."""
    command = [sys.executable, "-c", PROGRAM, state]
    environment = child_environment({"PYTHONPATH": ":".join(sys.path)})
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=LOADING_S)
    assert least_mib <= int(done.stdout) <= most_mib
