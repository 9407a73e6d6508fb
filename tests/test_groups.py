"""Tests that share an engine follow one another in one process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from tests.groups import FAMILIES, SHARED, GroupScheduling, group_of, pytest_collection_modifyitems

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("test", "group"),
    [
        *((f"{file}::test_a[qwen2-vl: a pixel too few]", "qwen2-vl") for file in FAMILIES),
        (f"{FAMILIES[0]}::test_a[whisper]", "whisper"),
        (f"{FAMILIES[0]}::test_a[qwen2.5-vl images-hf]", "qwen2.5-vl"),
        (f"{FAMILIES[0]}::test_a", FAMILIES[0]),
        ("tests/engine/test_transcriptions.py::test_a[{}]", "whisper"),
        ("tests/core/test_digest.py::test_a[whisper]", "tests/core/test_digest.py"),
    ],
)
def test_a_group_is_a_file_or_those_that_share_an_engine(test: str, group: str) -> None:
    assert group_of(test) == group


def test_every_file_that_shares_is_there() -> None:
    assert all((ROOT / file).exists() for file in (*FAMILIES, *SHARED))


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


@pytest.mark.parametrize(("reorders", "expected"), [(True, "a1 a2 b1 c1"), (False, "b1 a1 a2 c1")])
def test_groups_stay_together_and_those_that_may_take_longest_are_first_where_xdist_keeps_the_order(
    reorders: bool, expected: str
) -> None:
    def item(name: str, *timeout: int) -> Any:
        mark = pytest.mark.timeout(*timeout).mark if timeout else None
        return SimpleNamespace(nodeid=f"tests/test_{name[0]}.py::{name}", get_closest_marker=lambda _: mark)

    items = [item("a1"), item("b1", 900), item("a2", 30), item("c1")]
    config: Any = SimpleNamespace(getoption=lambda *_, **__: reorders)
    pytest_collection_modifyitems(config, items)
    assert " ".join(one.nodeid.partition("::")[2] for one in items) == expected
