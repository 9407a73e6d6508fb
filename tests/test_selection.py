"""Which tests `scripts/quick` runs for a change."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools.selection import changed_files, selected_tests

IMPORTS = {
    "semel.media.fetch.url": frozenset({"semel.errors"}),
    "semel.media.fetch.fetch.policy": frozenset({"semel.media.fetch.url"}),
    "semel.cli.fetching": frozenset({"semel.media.fetch.url", "semel.media.fetch.url.Url"}),
    "semel.cli.app": frozenset({"semel.cli.fetching"}),
    "semel.sizing": frozenset({"semel.errors"}),
}
TESTS = [
    "tests/cli/test_app.py",
    "tests/cli/test_fetching.py",
    "tests/media/test_decode.py",
    "tests/media/test_url.py",
    "tests/frontend/test_fetching.py",
    "tests/test_errors.py",
    "tests/test_sizing.py",
]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            ["src/semel/media/fetch/url.py"],
            ["tests/cli/test_fetching.py", "tests/media/test_decode.py", "tests/media/test_url.py"],
        ),
        (["src/semel/media/__init__.py"], ["tests/media/test_decode.py", "tests/media/test_url.py"]),
        (["src/semel/errors.py"], ["tests/media/test_url.py", "tests/test_errors.py", "tests/test_sizing.py"]),
        (["tests/cli/test_app.py"], ["tests/cli/test_app.py"]),
        (["tests/media/origin.py"], ["tests/media/test_decode.py", "tests/media/test_url.py"]),
        (["README.md", "src/semel/py.typed"], []),
    ],
)
def test_a_change_brings_its_package_and_what_imports_it(changed: list[str], expected: list[str]) -> None:
    assert selected_tests(changed, IMPORTS, TESTS) == expected


def test_what_is_committed_on_a_branch_what_is_not_and_what_is_new_has_changed(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, timeout=30)

    git("init", "--initial-branch=main")
    for name in ("old", "committed", "edited"):
        (tmp_path / name).write_text("1")
    git("add", ".")
    git("commit", "-m", "1")
    git("switch", "-c", "branch")
    (tmp_path / "committed").write_text("2")
    git("commit", "-am", "2")
    (tmp_path / "edited").write_text("2")
    (tmp_path / "new").write_text("2")
    assert changed_files(tmp_path) == ["committed", "edited", "new"]
