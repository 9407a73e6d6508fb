"""The containers' locks: in step with pyproject.toml, every file by its hash. `scripts/lock` writes them."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import pytest
from packaging.requirements import Requirement

from semel.processing.fingerprint import PACKAGES
from tests.locks import LOCKS, ROOT, Lock, Locked, faults, locked, requirements
from tests.resolution import pinned

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ENTRIES = {lock.name: locked(lock.path.read_text()) for lock in LOCKS}
FRONTEND = next(lock for lock in LOCKS if lock.name == "frontend")


def faults_of(entries: list[Locked], lock: Lock = FRONTEND) -> list[str]:
    return faults(entries, requirements(PROJECT, lock), pinned())


def with_change(name: str, **change: object) -> list[Locked]:
    return [replace(entry, **change) if entry.name == name else entry for entry in ENTRIES["frontend"]]  # type: ignore[arg-type]


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_a_lock_is_in_step_with_what_is_declared(lock: Lock) -> None:
    assert faults_of(ENTRIES[lock.name], lock) == []


def test_whatever_is_out_of_step_is_found() -> None:
    whole = ENTRIES["frontend"]
    without = [entry for entry in whole if entry.name != "aiohttp"]
    assert any("aiohttp" in fault and "none is locked" in fault for fault in faults_of(without))
    assert any("uvicorn" in fault for fault in faults_of(with_change("uvicorn", version="0.99.0")))
    assert any("versions.txt" in fault for fault in faults_of(with_change("pillow", version="13.0.1")))
    assert faults_of(with_change("idna", hashes=())) == ["idna has no hash"]
    assert faults_of([*whole, whole[0]]) == [f"{whole[0].name} is locked twice"]


def test_a_requirement_that_was_added_is_found() -> None:
    added = [*requirements(PROJECT, FRONTEND), Requirement("orjson>=3")]
    assert len(faults(ENTRIES["frontend"], added, pinned())) == 1


def test_an_entry_is_read_with_all_its_hashes_or_by_its_address() -> None:
    text = f"# a comment\nPy_Thing==1.0 \\\n    --hash=sha256:{'a' * 64} \\\n    --hash=sha256:{'b' * 64}\nbare==2.0\n"
    wheel = "https://example.org/torch-2.13.0%2Bcpu-cp312-cp312-linux_x86_64.whl"
    address = f"torch @ {wheel} \\\n    --hash=sha256:{'c' * 64}\n"
    assert locked(text + address) == [
        Locked("py-thing", "1.0", ("a" * 64, "b" * 64)),
        Locked("bare", "2.0", ()),
        Locked("torch", "2.13.0+cpu", ("c" * 64,)),
    ]


def test_a_hash_that_is_too_short_counts_for_none() -> None:
    (entry,) = locked(f"thing==1.0 \\\n    --hash=sha256:{'a' * 63}\n")
    assert entry.hashes == ()


def test_frontends_and_workers_are_locked_to_the_same_features_and_only_workers_to_a_gpu() -> None:
    versions = {name: {one.name: one.version.partition("+")[0] for one in entries} for name, entries in ENTRIES.items()}
    assert all(versions["frontend"][package] == versions["worker"][package] for package in PACKAGES)
    assert "vllm" in versions["worker"]
    assert not [name for name in versions["frontend"] if name.startswith(("nvidia-", "cuda-", "triton", "vllm"))]


def test_the_cpu_builds_in_the_lock_are_those_that_were_looked_up() -> None:
    found = locked((ROOT / "containers/torch-cpu.txt").read_text())
    assert {entry.name for entry in found} == {"torch", "torchvision"}
    assert all(entry in ENTRIES["frontend"] for entry in found)
