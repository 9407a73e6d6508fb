"""Files without a test that `-m` selects are not even imported: importing all of them takes 20 s in each process.

Which marks a file's tests can have is read in its text, and in that of the modules of tests that it imports.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import chain, combinations
from pathlib import Path
from typing import Final

import pytest
from _pytest.mark.expression import Expression, ExpressionMatcher

__all__ = ["Marks", "can_select", "pytest_ignore_collect", "pytest_itemcollected"]

NAMES: Final = frozenset({"alone", "engine", "nightly", "slow"})
_ROOT: Final = Path(__file__).parent.parent
_MARK: Final = re.compile(r"\bmark\.(\w+)")
_OF_ALL: Final = re.compile(r"^pytestmark = (\[[^\]]*\]|.*)$", re.MULTILINE)
_IMPORT: Final = re.compile(r"^from (tests(?:\.\w+)*\.(?!test_)\w+) import", re.MULTILINE)

Marks = frozenset[str]


def _named(text: str) -> Marks:
    return NAMES & set(_MARK.findall(text))


@cache
def _in_module(path: Path) -> Marks:
    return _named(path.read_text()) if path.exists() else frozenset()


@cache
def marks_of(path: Path) -> tuple[Marks, Marks]:
    """The marks that all tests of a file have, and those that any of them can have."""
    text = path.read_text()
    found = _OF_ALL.search(text)
    imported = (_ROOT / f"{name.replace('.', '/')}.py" for name in _IMPORT.findall(text))
    return _named(found[1]) if found else frozenset(), _named(text).union(*map(_in_module, imported))


def can_select(expression: str, of_all: Marks, possible: Marks) -> bool:
    """Whether a test with all of the first marks, and some of the others, can be selected; if in doubt, it can."""
    if not expression or set(re.findall(r"\w+", expression)) - NAMES - {"and", "or", "not"}:
        return True
    free = possible - of_all
    compiled = Expression.compile(expression)
    some = chain.from_iterable(combinations(free, count) for count in range(len(free) + 1))
    return any(compiled.evaluate(_has(of_all.union(one))) for one in some)


def _has(marks: Marks) -> ExpressionMatcher:
    def has(name: str, /, **_: str | int | bool | None) -> bool:
        return name in marks

    return has


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave a file out of the collection; None lets others decide."""
    if not collection_path.name.startswith("test_") or collection_path.suffix != ".py":
        return None
    return None if can_select(config.option.markexpr, *marks_of(collection_path)) else True


def pytest_itemcollected(item: pytest.Item) -> None:
    """Refuse a mark that is not seen in the text: its test would be left out somewhere."""
    of_all, possible = marks_of(item.path)
    marks = NAMES & {mark.name for mark in item.iter_markers()}
    if not of_all <= marks <= possible:
        raise pytest.UsageError(
            f"{item.nodeid} is {sorted(marks)}, and the text says {sorted(possible)}: tests/markers.py"
        )
