"""The rows of docs/project/requirements.md, and the test files that name them.

A file names a row in the name of a test (`test_b4_…`, `…_A5`), or in the docstring of its module, of a test or of a
class (`S9`, `A1-A6`, `S5 to S10`). `scripts/requirements` writes the page's last section: the files of each row.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = [
    "PAGE",
    "STATUSES",
    "Row",
    "faults",
    "files_by_row",
    "main",
    "read_rows",
    "row_names",
    "rows_of_module",
    "suite",
    "with_files",
]

ROOT: Final = Path(__file__).resolve().parent.parent
PAGE: Final = ROOT / "docs" / "project" / "requirements.md"
STATUSES: Final = ("tested", "in part", "not yet")
_SECTION: Final = "## Tests by row\n"

_LINE: Final = re.compile(r"^\| ([A-Z]\d{1,2}) \| (.+) \| ([^|]+) \|$")
_ROW: Final = r"(?:[A-E]\d|S\d{1,2})"
_MENTION: Final = re.compile(rf"\b({_ROW})(?:(?:-| to )({_ROW}))?\b")
_IN_TEST_NAME: Final = re.compile(rf"\btest_((?:[a-e]\d|s\d{{1,2}}))_|_({_ROW})(?=_|\b)")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the page's tables."""

    name: str
    text: str
    status: str


def read_rows(page: str) -> list[Row]:
    """Return the rows of a page, in its order."""
    tables = page.partition(_SECTION)[0]
    return [Row(*match.groups()) for line in tables.splitlines() if (match := _LINE.match(line))]


def with_files(page: str, files: Mapping[str, Sequence[str]]) -> str:
    """Return the page with the list of files for every row that is tested, or in part."""
    tables = page.partition(_SECTION)[0]
    lines = ["| row | test files |", "|---|---|"]
    names = [row.name for row in read_rows(page) if row.status != "not yet"]
    lines += [f"| {name} | {', '.join(f'`{file}`' for file in files.get(name, ()))} |" for name in names]
    return tables + _SECTION + "\n".join(lines) + "\n"


def faults(page: str, files: Mapping[str, Sequence[str]]) -> list[str]:
    """Return what is wrong with the rows of a page, as sentences."""
    rows = read_rows(page)
    names = [row.name for row in rows]
    found = [f"{name} is there twice" for name in sorted({name for name in names if names.count(name) > 1})]
    found += [f"{name} is not in the page; named by {', '.join(files[name])}" for name in files if name not in names]
    for row in rows:
        if row.status not in STATUSES:
            found.append(f"{row.name} is {row.status!r}; it may be {' or '.join(STATUSES)}")
        elif (row.status != "not yet") != (row.name in files):
            found.append(f"{row.name} is {row.status!r}, and {len(files.get(row.name, ()))} test files name it")
    return found


def files_by_row(paths: Iterable[Path], root: Path = ROOT) -> dict[str, list[str]]:
    """Return the test files that name each row, as paths from the root."""
    found: dict[str, list[str]] = {}
    for path in sorted(paths):
        for name in rows_of_module(path.read_text()):
            found.setdefault(name, []).append(path.relative_to(root).as_posix())
    return found


def rows_of_module(source: str) -> set[str]:
    """Return the rows that a test module names; none if there is no test in it."""
    if not _MENTION.search(source) and not _IN_TEST_NAME.search(source):
        return set()
    module = ast.parse(source)
    nodes = [module, *_members(module.body)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    tests = [node for node in functions if node.name.startswith("test_")]
    if not tests and ".TestCase" not in source:
        return set()
    names = {(lower or upper).upper() for test in tests for lower, upper in _IN_TEST_NAME.findall(test.name)}
    places = [node for node in nodes if isinstance(node, ast.Module | ast.ClassDef)]
    for place in (*places, *tests):
        names |= set(row_names(ast.get_docstring(place) or ""))
    return names


def _members(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module and of its classes."""
    for node in body:
        yield node
        if isinstance(node, ast.ClassDef):
            yield from _members(node.body)


def row_names(text: str) -> Iterator[str]:
    """Yield the rows that a text mentions; a range stands for every row in it."""
    for first, last in _MENTION.findall(text):
        for number in range(int(first[1:]), int((last or first)[1:]) + 1):
            yield f"{first[0]}{number}"


def suite() -> list[Path]:
    """Return every test module; the one about rows has made-up ones in it."""
    return [path for path in (ROOT / "tests").rglob("test_*.py") if path.name != "test_requirements.py"]


def main() -> None:
    """Write the files of each row into the page."""
    PAGE.write_text(with_files(PAGE.read_text(), files_by_row(suite())))


if __name__ == "__main__":
    main()
