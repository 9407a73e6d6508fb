"""The documentation is true: links and paths resolve. What the README tells to run is run in `tests/serve`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_file_resolves(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_in_code_quotes_exists(page: Path) -> None:
    paths = re.findall(r"`((?:src|tests|docs|scripts|\.ci)/[\w./-]+)`", page.read_text())
    missing = [path for path in paths if "NAME" not in path and not (ROOT / path).exists()]
    assert not missing
