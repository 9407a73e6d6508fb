"""The shared memory of vLLM's communicator between CPU workers: its names go when all processes have mapped it."""

from __future__ import annotations

from pathlib import Path

import pytest

from semel.engine.vllm.compat.internals import communicator_segments

ENGINE = "vllm_dist_0a1b"
OURS = f"{ENGINE}-tp:0-[2-3]-cpushm_1", f"{ENGINE}-pp:0-[1-3]-cpushm_1"
OTHERS = (
    f"{ENGINE}-tp:0-[2-3]-cpushm_0",  # of our group, another process made it
    f"{ENGINE}-tp:0-[0-1]-cpushm_1",  # of another group, which may not have mapped it yet
    f"{ENGINE}-pp:0-[0-2]-cpushm_1",
    "vllm_dist_ffff-tp:0-[2-3]-cpushm_1",  # of another engine
    f"{ENGINE}0-tp:0-[2-3]-cpushm_1",
    f"{ENGINE}-tp:0-[2-3]-cpushm_7",
    "psm_1234",
)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("semel.engine.vllm.compat.internals._SHARED_MEMORY", tmp_path)
    for name in (*OURS, *OTHERS):
        (tmp_path / name).touch()
    return tmp_path


def test_a_worker_process_removes_what_it_made_itself_and_nothing_else(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_DIST_IDENT", ENGINE)
    assert {path.name for path in communicator_segments(3)} == set(OURS)
    of_all = {path.name for rank in range(4) for path in communicator_segments(rank)}
    assert of_all == {name for name in (*OURS, *OTHERS) if name.startswith(f"{ENGINE}-")} - {OTHERS[5]}


def test_without_such_an_engine_nothing_is_ours(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_DIST_IDENT", raising=False)
    assert list(communicator_segments(3)) == []
