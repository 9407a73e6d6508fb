"""Tests that share an engine follow one another in one process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from tests.groups import FAMILIES, GroupScheduling


class Process:
    """A process of xdist's, as its scheduler sees one: which tests it is given."""

    def __init__(self) -> None:
        self.given: list[int] = []
        self.gateway = SimpleNamespace(id=str(id(self)))
        self.shutting_down = False

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += indices

    def shutdown(self) -> None:
        self.shutting_down = True


@pytest.mark.parametrize("scheduling", [GroupScheduling, LoadFileScheduling])
def test_one_process_runs_all_of_a_group(scheduling: type) -> None:
    """Control: xdist's own scheduler gives all of the file to one process."""
    rigs = ["qwen2-vl", "whisper: a", "qwen2-vl images", "whisper"]
    option = SimpleNamespace(maxschedchunk=None, loadscopereorder=True)
    config = SimpleNamespace(option=option, getvalue=lambda name: ["popen"] * 2 if name == "tx" else "loadfile")
    processes = [Process(), Process()]
    scheduler = scheduling(config, Producer("test", enabled=False))
    for process in processes:
        scheduler.add_node(process)
        scheduler.add_node_collection(process, [f"{FAMILIES[0]}::test_rows[{rig}]" for rig in rigs])
    scheduler.schedule()
    given = sorted(sorted(process.given) for process in processes)
    assert given == ([[0, 2], [1, 3]] if scheduling is GroupScheduling else [[], [0, 1, 2, 3]])
