"""`semel batch` with the packages that `semel[client]` installs, and no others of this environment."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from semel.lab.testing.references import serve_references
from tests.batch.files import Batch, chat, request
from tests.test_resolution import EXTRAS, PROJECT

RUN = """
import sys
foreign, sys.argv[1:] = {*sys.argv[1].split(",")}, sys.argv[2:]
class NotInstalled:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in foreign:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NotInstalled())
from semel.cli import main
main()
"""


def installed_with(requirements: list[Requirement]) -> set[str]:
    """The packages that these bring, themselves included."""
    found, left = set[str](), requirements
    while left:
        requirement = left.pop()
        if (name := canonicalize_name(requirement.name)) in found or not _applies(requirement):
            continue
        found.add(name)
        left += [Requirement(line) for line in distribution(name).requires or ()]
    return found


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def test_a_batch_with_files_of_a_folder_needs_no_more_than_it_says(tmp_path: Path) -> None:
    ours = installed_with([*map(Requirement, PROJECT["dependencies"]), *EXTRAS["client"]]) | {"semel"}
    modules = packages_distributions()
    foreign = {name for name, owners in modules.items() if not ours & {*map(canonicalize_name, owners)}}
    assert {"aiohttp", "numpy", "pybase64", "starlette", "torch"} <= foreign
    (tmp_path / "page.png").write_bytes(os.urandom(3_000))
    batch = Batch(tmp_path, request("a", chat(f"file://{tmp_path}/page.png")))
    with serve_references() as server:
        words = ("batch", batch.input, batch.output, "--base-url", server.url, "--allowed-local-media-path", tmp_path)
        command = [sys.executable, "-c", RUN, ",".join(foreign), *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "1 results" in done.stderr) == (0, True), done.stderr
