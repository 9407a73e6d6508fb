"""Figures of the pages have their command beside them, and `scripts/figures` runs it."""

from __future__ import annotations

import pytest

from tools.figures import FIGURES, ROOT, commands_of

PAGES = {page: (ROOT / page).read_text() for one in FIGURES.values() for page in one.pages}
EVERY_PAGE = {
    str(page.relative_to(ROOT)): page.read_text() for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
}
EXAMPLES = ("semel bench serve MODEL", "semel bench serve --quick", "semel bench serve --baseline http")
"""How commands begin that only show how to ask."""


def missing(pages: dict[str, str], known: list[str]) -> list[str]:
    """The commands of pages that measure and that nobody runs."""
    return [
        f"{page}: {command}"
        for page, text in pages.items()
        for command in commands_of(text)
        if not command.startswith(EXAMPLES) and not any(one.startswith(command) or command == one for one in known)
    ]


def test_every_command_that_measures_is_run() -> None:
    known = [one.command for one in FIGURES.values()] + [
        f"semel bench serve --only {one}" for one in ("pages", "rollouts", "video")
    ]
    assert missing(EVERY_PAGE, known) == []


def test_the_control_a_command_that_nobody_runs_is_found() -> None:
    known = [one.command for one in FIGURES.values() if one.command != "semel bench cache"]
    assert "docs/internals/caching.md: semel bench cache" in missing(EVERY_PAGE, known)


@pytest.mark.parametrize("name", FIGURES)
def test_each_is_in_its_pages(name: str) -> None:
    one = FIGURES[name]
    for page in one.pages:
        words = [command for command in commands_of(PAGES[page]) if one.command.startswith(command)]
        assert words or page == "README.md", f"{page} does not name `{one.command}`"
