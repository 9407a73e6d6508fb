"""What is published: `scripts/release` makes it, and refuses what is not whole. The whole of it runs by night."""

from __future__ import annotations

import json
import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from semel.engine.vllm.compat.versions import TESTED
from semel.media.decode.limits import CANON
from semel.wire.messages import PROTOCOL
from tools.locks import LOCKS, PYTHON, locked
from tools.release import (
    ROOT,
    Refused,
    check_tag,
    faults_of_sdist,
    faults_of_wheel,
    notes,
)

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CHANGES = "# Changes\n\n## Unreleased\n- more\n\n## 0.2.0\n- second\n\n## 0.1.0\n- first\n"
COMMITTED = ["README.md", "src/semel/__init__.py", "src/semel/py.typed", "tests/test_one.py"]
INFO = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "licenses/NOTICE")


def wheel_of(folder: Path, names: list[str]) -> Path:
    path = folder / "semel-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return path


def sdist_of(folder: Path, names: list[str]) -> Path:
    path = folder / "semel-0.1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(f"semel-0.1.0/{name}"))
    return path


def test_a_tag_names_the_version_and_the_changelog_has_it() -> None:
    check_tag("v0.2.0", "0.2.0", CHANGES)
    for tag, version in (("v0.2.0", "0.1.0"), ("0.2.0", "0.2.0"), ("v0.3.0", "0.3.0"), ("v0.2", "0.2")):
        with pytest.raises(Refused):
            check_tag(tag, version, CHANGES)


def test_the_changelog_has_notes_for_the_next_release_and_no_tag_passes_until_they_bear_its_version() -> None:
    version, changes = PROJECT["version"], (ROOT / "CHANGELOG.md").read_text()
    assert notes("Unreleased", changes)
    with pytest.raises(Refused, match="no section"):
        check_tag(f"v{version}", version, changes)
    check_tag(f"v{version}", version, changes.replace("## Unreleased", f"## {version}"))


def test_a_wheel_has_the_package_and_its_licences_and_nothing_else(tmp_path: Path) -> None:
    whole = ["semel/__init__.py", "semel/py.typed", *(f"semel-0.1.0.dist-info/{name}" for name in INFO)]
    assert faults_of_wheel(wheel_of(tmp_path, whole), COMMITTED) == []
    for name in whole:
        less = [other for other in whole if other != name]
        assert faults_of_wheel(wheel_of(tmp_path, less), COMMITTED) == [f"{name} is missing"]
    for name in ("semel/.env", "tests/test_one.py", "semel/secret.py"):
        assert faults_of_wheel(wheel_of(tmp_path, [*whole, name]), COMMITTED) == [f"{name} is not committed"]


def test_an_sdist_is_what_is_committed(tmp_path: Path) -> None:
    whole = [*COMMITTED, "PKG-INFO"]
    assert faults_of_sdist(sdist_of(tmp_path, whole), COMMITTED) == []
    assert faults_of_sdist(sdist_of(tmp_path, whole[1:]), COMMITTED) == ["README.md is missing"]
    assert faults_of_sdist(sdist_of(tmp_path, [*whole, "fleet.key"]), COMMITTED) == ["fleet.key is not committed"]


def unsaid(page: str) -> list[str]:
    """What holds and the page of versions does not say."""
    oldest = PROJECT["requires-python"].removeprefix(">=")
    facts = [*TESTED, f"{oldest} or newer", f"the images have {PYTHON}"]
    facts += [f"the wire protocol ({PROTOCOL})", f"(CANON {CANON})"]
    return [fact for fact in facts if fact not in page]


def test_the_page_of_versions_says_what_the_code_has() -> None:
    page = (ROOT / "docs/operate/upgrading.md").read_text()
    assert unsaid(page) == []
    assert unsaid(page.replace("0.31", "0.30")) == ["0.31"]
    assert unsaid(page.replace(f"({PROTOCOL})", "(0)")) == [f"the wire protocol ({PROTOCOL})"]


def is_whole(folder: Path) -> bool:
    command = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    return subprocess.run(command, cwd=folder, capture_output=True, timeout=60, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_wheel_and_an_sdist_install_and_run_and_have_their_bills(tmp_path: Path) -> None:
    # From a clone: nothing that lies in the checkout may count.
    clone, output = tmp_path / "clone", tmp_path / "dist"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True, timeout=300)
    (clone / ".venv").symlink_to((ROOT / ".venv").resolve())
    (clone / "src/semel/secret.py").write_text("KEY = 1\n")
    command: list[str | Path] = [clone / "scripts/release", "--output", output]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    names = sorted(path.name.rpartition("-")[2] for path in (output / "packages").iterdir())
    assert [name.rpartition(".")[2] for name in names] == ["gz", "whl"]
    assert is_whole(output)
    for lock in LOCKS[1:]:
        bill = json.loads((output / f"semel-{lock.name}.cdx.json").read_text())
        expected = {(entry.name, entry.version) for entry in locked(lock.path.read_text())}
        found = {(one["name"], one.get("version")) for one in bill["components"]}
        assert bill["bomFormat"] == "CycloneDX"
        assert bill["metadata"]["component"]["name"] == "semel"
        assert {name for name, _ in found} == {name for name, _ in expected}
    again = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert again.returncode == 1
    assert "is not empty" in again.stderr
