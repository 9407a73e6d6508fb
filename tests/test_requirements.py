"""The page of requirements agrees with the tests that name its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from tools.requirements import PAGE, faults, files_by_row, read_rows, row_names, suite, with_files

TABLE = "| A1 | One. | tested |\n| A2 | Two. | not yet |\n"


@pytest.fixture(scope="module")
def files() -> Mapping[str, Sequence[str]]:
    return files_by_row(suite())


def test_every_row_that_a_test_names_is_there_and_every_row_called_tested_has_a_test(
    files: Mapping[str, Sequence[str]],
) -> None:
    assert not faults(PAGE.read_text(), files)


def test_the_page_lists_the_files_that_name_each_row(files: Mapping[str, Sequence[str]]) -> None:
    page = PAGE.read_text()
    assert page == with_files(page, files), "run scripts/requirements"


def test_no_row_is_missing_from_the_page() -> None:
    names = [row.name for row in read_rows(PAGE.read_text())]
    assert names == list(row_names("A1-A6 B1-B9 C1-C5 D1-D8 E1-E5 S1-S34"))


@pytest.mark.parametrize(
    ("page", "files", "fault"),
    [
        (TABLE, {"A1": ["t.py"], "A3": ["t.py"]}, "A3 is not in the page; named by t.py"),
        (TABLE, {}, "A1 is 'tested', and 0 test files name it"),
        (TABLE + TABLE[: TABLE.index("\n") + 1], {"A1": ["t.py"]}, "A1 is there twice"),
    ],
)
def test_a_page_that_does_not_agree_is_found_out(page: str, files: Mapping[str, Sequence[str]], fault: str) -> None:
    assert faults(page, files) == [fault]
