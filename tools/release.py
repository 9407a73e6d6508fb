"""Makes what is published, and checks it: a wheel, an sdist, bills of materials, checksums.

    scripts/release                   # into dist/
    scripts/release --tag v0.1.0      # and the tag has to be this version's

Both archives are built from the committed tree alone, the wheel a second time from the sdist: the bytes have to be the
same. Each is installed into an environment of its own, whose `semel` has to say which version it is and what a frontend
takes. `dist/packages` is for PyPI; nothing is uploaded here: the release workflow does that.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from tools.locks import LOCKS

__all__ = ["Refused", "build", "check_tag", "checksums", "main", "missing_and_foreign", "notes", "write_sbom"]

ROOT: Final = Path(__file__).resolve().parent.parent
_CYCLONEDX: Final = "cyclonedx-bom==7.5.0"
_TIMEOUT_S: Final = 900
_DIST_INFO: Final = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "licenses/NOTICE")


class Refused(Exception):
    """A build that must not be published."""


def check_tag(tag: str, version: str, changes: str) -> None:
    """A tag names the version of pyproject.toml, and the changelog has a section for it."""
    if tag != f"v{version}":
        raise Refused(f"the tag is {tag}, pyproject.toml has {version}: tag v{version}, or change the version")
    if not notes(version, changes):
        raise Refused(f"CHANGELOG.md has no section '## {version}', or nothing in it")


def notes(version: str, changes: str) -> str:
    """Return what the changelog says about a version."""
    found = re.search(rf"^## {re.escape(version)}(?: .*)?\n(.*?)(?=^## |\Z)", changes, re.DOTALL | re.MULTILINE)
    return found[1].strip() if found else ""


def build(source: Path, output: Path, python: Path) -> tuple[Path, Path]:
    """Return the sdist and the wheel of a folder, by what `containers/build.lock` names."""
    output.mkdir(parents=True)
    for target in ("sdist", "wheel"):
        _run([python, "-m", "hatchling", "build", "--target", target, "--directory", output], cwd=source)
    (sdist,), (wheel,) = output.glob("*.tar.gz"), output.glob("*.whl")
    return sdist, wheel


def missing_and_foreign(names: Sequence[str], expected: Sequence[str]) -> list[str]:
    """Return what an archive lacks, and what it has that nobody committed, as sentences."""
    return [
        *(f"{name} is missing" for name in sorted({*expected} - {*names})),
        *(f"{name} is not committed" for name in sorted({*names} - {*expected})),
    ]


def faults_of_wheel(wheel: Path, committed: Sequence[str]) -> list[str]:
    """Check that a wheel has the package as it is committed, its licences, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    info = "-".join(wheel.name.split("-")[:2]) + ".dist-info"
    package = [name.removeprefix("src/") for name in committed if name.startswith("src/semel/")]
    return missing_and_foreign(names, [*package, *(f"{info}/{name}" for name in _DIST_INFO)])


def faults_of_sdist(sdist: Path, committed: Sequence[str]) -> list[str]:
    """An sdist is the committed tree and its metadata."""
    with tarfile.open(sdist) as archive:
        names = [member.name.partition("/")[2] for member in archive.getmembers() if not member.isdir()]
    return missing_and_foreign(names, [*committed, "PKG-INFO"])


def check_installed(archive: Path, version: str, folder: Path) -> None:
    """Install it into an empty environment; its `semel` says its version and knows the frontend's flags."""
    python = _environment(folder, [str(archive)])
    semel = python.parent / "semel"
    said = _run([semel, "--version"], cwd=folder).strip()
    if said != f"semel {version}":
        raise Refused(f"{archive.name} installs {said}, not semel {version}")
    for command in (["--help"], ["frontend", "--help"]):
        if "Usage: semel" not in _run([semel, *command], cwd=folder):
            raise Refused(f"{archive.name}: semel {' '.join(command)} says nothing")


def write_sbom(python: Path, lock: Path, output: Path) -> Mapping[str, Any]:
    """Return a bill of materials in CycloneDX's form: semel, and every package of a lock with its hashes."""
    command: list[str | Path] = [python, "-m", "cyclonedx_py", "requirements", lock, "--output-file", output]
    command += ["--pyproject", ROOT / "pyproject.toml", "--mc-type", "application", "--output-reproducible"]
    _run([*command, "--spec-version", "1.6", "--output-format", "JSON", "--validate"], cwd=ROOT)
    bill: Mapping[str, Any] = json.loads(output.read_text())
    return bill


def checksums(folder: Path) -> str:
    """Return the hashes of all files of a folder, as `sha256sum --check` reads them in it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.relative_to(folder)}" for file in files]
    return "\n".join([*lines, ""])


def main() -> None:
    """Make `dist/`, or end with 1 and the reason why nothing may be published."""
    parser = argparse.ArgumentParser(description="Make and check what is published.")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="an empty folder, or none")
    parser.add_argument("--tag", help="refuse to build unless it names this version")
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="release-") as folder:
            _release(options.output, options.tag, Path(folder))
    except Refused as refused:
        sys.exit(f"scripts/release: {refused}")


def _release(output: Path, tag: str | None, folder: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version, changes = str(project["version"]), (ROOT / "CHANGELOG.md").read_text()
    if tag is not None:
        check_tag(tag, version, changes)
    if output.exists() and any(output.iterdir()):
        raise Refused(f"{output} is not empty")
    say = Console(highlight=False, soft_wrap=True).print
    made = folder / "made"
    packages = made / "packages"
    with _committed_tree(folder) as tree:
        committed = _run(["git", "ls-files"], cwd=ROOT).splitlines()
        builder = _environment(folder / "builder", ["--require-hashes", "--requirement", str(LOCKS[0].path)])
        sdist, wheel = build(tree, packages, builder)
        _check_archives(sdist, wheel, committed, builder, folder)
    say(f"scripts/release: {sdist.name} and {wheel.name}: all that is committed, the same bytes from the sdist")
    for archive in (wheel, sdist):
        check_installed(archive, version, folder / archive.name.rpartition(".")[2])
        say(f"scripts/release: {archive.name} installs and runs")
    tools = _environment(folder / "tools", [_CYCLONEDX])
    for lock in LOCKS[1:]:
        bill = write_sbom(tools, lock.path, made / f"semel-{lock.name}.cdx.json")
        say(f"scripts/release: the bill of {lock.path.name} has {len(bill['components'])} packages")
    (made / "NOTES.md").write_text(notes(version, changes) + "\n")
    (made / "SHA256SUMS").write_text(checksums(made))
    shutil.copytree(made, output, dirs_exist_ok=True)
    say(f"scripts/release: {output}")


def _check_archives(sdist: Path, wheel: Path, committed: Sequence[str], builder: Path, folder: Path) -> None:
    for archive, faults in ((wheel, faults_of_wheel(wheel, committed)), (sdist, faults_of_sdist(sdist, committed))):
        if faults:
            raise Refused(f"{archive.name}: {'; '.join(faults[:10])}")
    with tarfile.open(sdist) as packed:
        packed.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    again = build(unpacked, folder / "again", builder)[1]
    if again.read_bytes() != wheel.read_bytes():
        raise Refused("the wheel that is built from the sdist has other bytes")


@contextlib.contextmanager
def _committed_tree(folder: Path) -> Iterator[Path]:
    """The files of HEAD, without what else lies in the checkout."""
    if _run(["git", "status", "--porcelain", "--untracked-files=no"], cwd=ROOT):
        raise Refused("something is changed and not committed")
    archive, tree = folder / "tree.tar", folder / "tree"
    _run(["git", "archive", "--output", archive, "HEAD"], cwd=ROOT)
    with tarfile.open(archive) as packed:
        packed.extractall(tree, filter="data")
    yield tree


def _environment(folder: Path, arguments: Sequence[str]) -> Path:
    """Make an environment with nothing but these; return its Python."""
    _run([sys.executable, "-m", "venv", folder], cwd=ROOT)
    python = folder / "bin/python"
    _run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments], cwd=folder)
    return python


def _run(command: Sequence[str | Path], cwd: Path) -> str:
    # The tests' own folders and versions are no part of what is checked; the time of the commit is in the archives.
    left_out = ("PIP_CONSTRAINT", "PYTHONPATH", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment["SOURCE_DATE_EPOCH"] = _time_of_commit()
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise Refused(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def _time_of_commit() -> str:
    command = ["git", "log", "-1", "--format=%ct"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


if __name__ == "__main__":
    main()
